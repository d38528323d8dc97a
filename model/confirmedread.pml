/*
 * The confirmed read: one-sided gets of one key from a Raft group, while leaders are
 * elected, deposed and stopped, replicas crash and come back, and messages are late.
 * model/README.md says what stands for what, and why one reader is enough.
 *
 * Bounds, set with -D:  N voters, TERMS the highest term, WRITES writes of the key,
 * CRASHES crashes (each with a restart). RECONFIG: four replicas, and one change of the
 * voters from {0,1,2} over both sets at once (joint consensus) to {0,2,3}.
 *
 * Broken variants, one at a time: see the words that follow #ifdef and #ifndef below.
 */

#ifdef RECONFIG
#define N 4
#endif
#ifndef N
#define N 3
#endif
#ifndef TERMS
#define TERMS 2
#endif
#ifndef WRITES
#define WRITES 1
#endif
#ifndef CRASHES
#define CRASHES 1
#endif

/* The log: the entry that all begin with, one entry of each later leader, the writes, and what the
 * broken variants need more, in which a term can be led twice. */
#ifdef RECONFIG
#define LEN (TERMS + WRITES + 2)
#elif defined(TERM_FORGOTTEN) || defined(REQUEST_BEFORE_SYNC)
#define LEN (TERMS + WRITES + 1)
#else
#define LEN (TERMS + WRITES)
#endif

/* An entry: its term, and which one of that term: empty, a write, or a change. */
#define ENTRY(term, kind) ((term) * 8 + (kind))
#define TERM(e) ((e) / 8)
#define KIND(e) ((e) % 8)
#define EMPTY 0
#define BOTH 6		/* the configuration becomes both sets of voters at once */
#define NEXT 7		/* the configuration becomes the new set alone */
#define IS_WRITE(e) (KIND(e) >= 1 && KIND(e) <= 5)
#define IS_CHANGE(e) (KIND(e) >= BOTH)

/* Sets of replicas are bits. */
#define BIT(i) (1 << (i))
#define SIZE(s) (((s) & 1) + (((s) >> 1) & 1) + (((s) >> 2) & 1) + (((s) >> 3) & 1) + (((s) >> 4) & 1))
#ifdef RECONFIG
#define OLD_VOTERS 7	/* 0, 1, 2 */
#define NEW_VOTERS 13	/* 0, 2, 3 */
#define MAJORITY(s, voters) (2 * SIZE((s) & (voters)) > SIZE(voters))
#define QUORUM(s, config) ((config == 2 || MAJORITY(s, OLD_VOTERS)) && (config == 0 || MAJORITY(s, NEW_VOTERS)))
#define VOTES(i, config) ((config != 2 && (BIT(i) & OLD_VOTERS)) || (config != 0 && (BIT(i) & NEW_VOTERS)))
#else
#define QUORUM(s, config) (2 * SIZE(s) > N)
#define VOTES(i, config) true
#endif

/* A search for a counterexample that is known may leave out what it does not need. */
#ifdef CONFIG_NOT_CHECKED
#define GUIDE(condition) (condition)
#else
#define GUIDE(condition) true
#endif

#define FOLLOWER 0
#define CANDIDATE 1
#define LEADER 2

/* ---- replicas ---- */

/* On disk. */
byte diskTerm[N] = 1;
byte diskVote[N];		/* candidate + 1, in diskTerm; 0: none */
byte log[N * LEN];
byte last[N] = 1;		/* entries in log */
byte commit[N] = 1;

/* In memory. */
byte term[N] = 1;		/* what Raft acts on */
byte role[N];
byte applied[N] = 1;		/* up to here the arena shows the log; it is what is READ */

/* The control record. */
byte shownTerm[N] = 1;
byte served[N];
#ifdef RECONFIG
byte config[N];			/* 0: old voters, 1: both, 2: new */
#define CONFIG(i) config[i]
#else
#define CONFIG(i) 0
#endif

/* ---- messages: whatever was sent can arrive at any later time, again, or never ---- */

byte votes[(TERMS + 1) * N];	/* who granted its vote, by term and candidate */
byte sent[(TERMS + 1) * LEN];	/* the log that the leader of a term sends */
byte sentLast[TERMS + 1];
byte sentCommit[TERMS + 1];
byte leaderOf[TERMS + 1];	/* replica + 1 while it leads the term */
byte acked[(TERMS + 1) * N];	/* up to where a replica has told its leader that its disk has the log */
#define VOTESFOR(t, i) votes[(t) * N + (i)]
#define SENT(t, k) sent[(t) * LEN + (k)]
#define ACKED(t, i) acked[(t) * N + (i)]
#define LOG(i, k) log[(i) * LEN + (k)]

/* ---- writers: one write at a time at its leader, answered by it ---- */

byte writes;			/* proposed so far */
byte proposer[WRITES + 1];	/* replica + 1 while somebody waits there for the answer */
byte proposedAt[WRITES + 1];

/* ---- what is known of terms that were served: routes ---- */

byte route[TERMS + 1];		/* replica + 1 that was seen serving the term, and has not crashed since */
#ifdef CONFIG_NOT_CHECKED
byte routeConfig[TERMS + 1];
#endif

byte crashes;

/* ---- the truth, which nobody sees ---- */

byte chosen[LEN];		/* committed entries */
byte chosenLast = 1;
byte floor = 1;			/* newest write that was acknowledged, or shown to anybody */

/* ---- the reader ---- */

#define IDLE 0
#define STARTED 1		/* a one-sided get: at first another voter was asked; */
#define HAVE_FIRST 2		/* the leader's object was READ, */
#define HAVE_BOTH 3		/* and behind it the leader's record */
#define ASKED 4			/* a get over gRPC: the leader was asked, */
#define QUORUM_HEARD 5		/* which heard from a quorum, */
#define ENGINE_READ 6		/* and read its engine */
byte get;
byte getTerm;			/* the route: the term, thereby its leader; and the configuration */
byte getConfig;
byte getFloor;			/* floor when the get began */
byte getIndex;			/* what was read: index of the write */
byte getKind;			/* and which write it was */
byte getSeen;			/* other voters whose record was good */
#define L (route[getTerm] - 1)

#ifdef FROZEN
/* The record of a process that died, which a mapping still shows. */
byte frozen;			/* replica + 1 */
byte frozenTerm;
#endif

hidden byte k, n, s, e;		/* used within one step */

inline endGet() {
	get = IDLE; getTerm = 0; getConfig = 0; getFloor = 0; getIndex = 0; getKind = 0; getSeen = 0
}

/* What is shown to anybody must be committed, must be the write it is taken for, and must be
 * no older than what was acknowledged, or shown, before the get began. */
inline reveal() {
	printf("get: answers index %d\n", getIndex);
	assert(getIndex <= chosenLast);
	assert(getIndex == 1 || KIND(chosen[getIndex - 1]) == getKind);
	assert(getIndex >= getFloor);
	if :: getIndex > floor -> floor = getIndex :: else fi;
	endGet()
}

inline follow(i) {
	if
	:: role[i] == LEADER ->
		leaderOf[term[i]] = 0;
		k = 0;
		do
		:: k < N -> ACKED(term[i], k) = 0; k++
		:: else -> break
		od
	:: else
	fi;
	role[i] = FOLLOWER;
	served[i] = 0
}

inline persistTerm(i) {
	if
	:: diskTerm[i] < term[i] -> diskTerm[i] = term[i]; diskVote[i] = (role[i] != FOLLOWER -> i + 1 : 0)
	:: else
	fi
}

inline raiseTerm(i) {
	follow(i);
	term[i] = term[i] + 1;
	printf("replica %d: raises its term to %d\n", i, term[i]);
#ifndef TERM_AFTER_MESSAGE
	shownTerm[i] = term[i];
#endif
#ifndef REQUEST_BEFORE_SYNC
	if
	:: crashes == CRASHES -> persistTerm(i)	/* when does not matter any more */
	:: else
	fi
#endif
}

#define LAST_TERM(i) TERM(LOG(i, last[i] - 1))
#define UP_TO_DATE(j, i) (LAST_TERM(j) > LAST_TERM(i) || (LAST_TERM(j) == LAST_TERM(i) && last[j] >= last[i]))

/* A vote leaves when it is durable, and so does the request for votes. */
#define MAY_VOTE(i, j) (role[j] == CANDIDATE && term[j] == term[i] && !(VOTESFOR(term[i], j) & BIT(i)) && \
	(diskTerm[i] < term[i] || diskVote[i] == 0 || diskVote[i] == j + 1) && \
	(i == j || (role[i] == FOLLOWER && UP_TO_DATE(j, i))))

inline vote(voter, candidate) {
	printf("replica %d: votes for %d in term %d\n", voter, candidate, term[voter]);
	persistTerm(voter);
	diskVote[voter] = candidate + 1;
	VOTESFOR(term[voter], candidate) = VOTESFOR(term[voter], candidate) | BIT(voter)
}

inline append(i, kind) {
	SENT(term[i], sentLast[term[i]]) = ENTRY(term[i], kind);
	sentLast[term[i]] = sentLast[term[i]] + 1
}

inline lead(i) {
	printf("replica %d: leads term %d\n", i, term[i]);
	role[i] = LEADER;
	leaderOf[term[i]] = i + 1;
	VOTESFOR(term[i], i) = 0;
	k = 0;
	do
	:: k < LEN -> SENT(term[i], k) = LOG(i, k); k++
	:: else -> break
	od;
	sentLast[term[i]] = last[i];
	sentCommit[term[i]] = 1;
	append(i, EMPTY);
#ifdef SERVED_EARLY
	served[i] = term[i];
#endif
#if defined(SERVED_EARLY) || defined(SERVED_NOT_CHECKED) || defined(POSTED_TOGETHER)
	route[term[i]] = i + 1	/* somebody knows that it leads, not what it shows */
#endif
}

/* Sets k to how far the log agrees with what the leader of this term sends. Raft compares terms only. */
inline match(i) {
	k = 0;
	do
	:: k < last[i] && k < sentLast[term[i]] && TERM(LOG(i, k)) == TERM(SENT(term[i], k)) -> k++
	:: else -> break
	od
}

/* Sets n to the commit index that came with the entries of the log at the least, and is on the disk
 * with them: a second change of the voters is sent when the first is committed. */
inline carry(i) {
	n = 1;
#ifdef RECONFIG
	e = 0;
	do
	:: e < last[i] && KIND(LOG(i, e)) != BOTH -> e++
	:: else -> break
	od;
	n = e + 1;
	do
	:: e < last[i] && KIND(LOG(i, e)) != NEXT -> e++
	:: else -> break
	od;
	if :: e == last[i] -> n = 1 :: else fi
#endif
}

/* The leader's entries up to the first that is new are on this disk, the leader's own, too; and its
 * leader, as long as there is one, hears of it. */
inline store(i) {
	match(i);
	persistTerm(i);
	if :: role[i] == CANDIDATE -> role[i] = FOLLOWER :: else fi;
	if
	:: k < sentLast[term[i]] ->
		LOG(i, k) = SENT(term[i], k);
		k++;
		last[i] = k;
		printf("replica %d: has entry %d (term %d, kind %d) on disk\n", i, k, TERM(LOG(i, k - 1)), KIND(LOG(i, k - 1)));
		carry(i);
		if :: n > commit[i] -> commit[i] = n :: else fi;
		n = k;
		do
		:: n < LEN -> LOG(i, n) = 0; n++
		:: else -> break
		od
	:: else
	fi;
	if :: leaderOf[term[i]] != 0 -> ACKED(term[i], i) = k :: else fi
}

inline learnCommit(i) {
	match(i);
	if :: k > sentCommit[term[i]] -> k = sentCommit[term[i]] :: else fi;
	if :: k > commit[i] -> commit[i] = k :: else fi
}

/* Sets n to the next index that the leader may commit, 0 if there is none. */
inline nextCommit(i) {
	n = 0;
	k = commit[i] + 1;
	do
	:: k <= sentLast[term[i]] && n == 0 ->
		s = 0;
		e = 0;
		do
		:: e < N -> s = s | (BIT(e) * (ACKED(term[i], e) >= k)); e++
		:: else -> break
		od;
		if
		:: TERM(SENT(term[i], k - 1)) == term[i] && QUORUM(s, CONFIG(i)) -> n = k
		:: else
		fi;
		k++
	:: else -> break
	od
}

inline choose(i) {
	printf("replica %d: commits up to %d\n", i, n);
	commit[i] = n;
	sentCommit[term[i]] = n;
	k = 0;
	do
	:: k < n ->
		if
		:: k < chosenLast -> assert(chosen[k] == SENT(term[i], k))	/* Raft's own promise */
		:: else -> chosen[k] = SENT(term[i], k)
		fi;
		k++
	:: else -> break
	od;
	if :: n > chosenLast -> chosenLast = n :: else fi
}

#ifdef SHOWN_UNCOMMITTED
#define MAY_APPLY(i) (applied[i] < last[i] && (role[i] == LEADER || applied[i] < commit[i]))
#else
#define MAY_APPLY(i) (applied[i] < last[i] && applied[i] < commit[i])
#endif

inline apply(i) {
	e = LOG(i, applied[i]);
	applied[i] = applied[i] + 1;
	printf("replica %d: applies and shows entry %d (term %d, kind %d)\n", i, applied[i], TERM(e), KIND(e));
#ifdef RECONFIG
	if
	:: IS_CHANGE(e) ->
		config[i] = KIND(e) - BOTH + 1;
		if :: !VOTES(i, config[i]) && role[i] == LEADER -> follow(i) :: else fi
	:: else
	fi;
#endif
	if
	:: role[i] == LEADER && TERM(e) == term[i] ->
#ifdef CONFIG_NOT_CHECKED
		if :: served[i] == 0 -> routeConfig[term[i]] = config[i] :: else fi;
#endif
		served[i] = term[i];
		route[term[i]] = i + 1
	:: else
	fi
}

/* Process and memory are gone; the disk stays. The restart is part of the step: a dead replica
 * can do nothing but stay away, which a slow one can, too. */
inline crash(i) {
	printf("replica %d: crashes and comes back\n", i);
	crashes++;
	follow(i);
#ifdef FROZEN
	frozen = i + 1;
	frozenTerm = shownTerm[i];
#endif
	if :: get != IDLE && L == i -> endGet() :: else fi;
	k = 1;
	do
	:: k <= TERMS -> if :: route[k] == i + 1 -> route[k] = 0 :: else fi; k++
	:: else -> break
	od;
#ifdef TERM_FORGOTTEN
	diskTerm[i] = 1;
	diskVote[i] = 0;
#endif
	term[i] = diskTerm[i];
	shownTerm[i] = term[i];
	applied[i] = 1;
#ifdef RECONFIG
	config[i] = 0;
#endif
	k = 1;
	do
	:: k <= WRITES -> if :: proposer[k] == i + 1 -> proposer[k] = 0; proposedAt[k] = 0 :: else fi; k++
	:: else -> break
	od;
	k = 0
}

/* A replica that has not voted in its term asks for votes. Raft refuses that while changes of the
 * voters are committed and not applied. */
#ifdef REQUEST_BEFORE_SYNC
#define NOT_VOTED(i) (diskTerm[i] < term[i])
#else
#define NOT_VOTED(i) (diskTerm[i] < term[i] || diskVote[i] == 0)
#endif
#define MAY_STAND(i) (role[i] == FOLLOWER && term[i] > 1 && VOTES(i, CONFIG(i)) && NOT_VOTED(i))

inline stand(i) {
	n = 0;
#ifdef RECONFIG
	k = applied[i];
	do
	:: k < commit[i] && k < last[i] -> n = n + IS_CHANGE(LOG(i, k)); k++
	:: else -> break
	od;
#endif
	if
	:: n == 0 ->
		role[i] = CANDIDATE;
		printf("replica %d: asks for votes in term %d\n", i, term[i]);
#ifndef REQUEST_BEFORE_SYNC
		vote(i, i)
#endif
	:: else
	fi
}

proctype Replica(byte i) {
end:	do
	/* Elections. A term is raised to stand in it, or because it was heard of: who stands and is not
	 * heard has only raised it. */
	:: d_step { term[i] < TERMS && GUIDE(config[i] == 2 && i >= 2) -> raiseTerm(i) }
	:: d_step { MAY_STAND(i) -> stand(i) }
#ifdef TERM_AFTER_MESSAGE
	:: d_step { shownTerm[i] < term[i] -> shownTerm[i] = term[i]; printf("replica %d: shows term %d\n", i, term[i]) }
#endif
	:: d_step { MAY_VOTE(i, 0) -> vote(i, 0) }
	:: d_step { MAY_VOTE(i, 1) -> vote(i, 1) }
	:: d_step { MAY_VOTE(i, 2) -> vote(i, 2) }
#if N > 3
	:: d_step { MAY_VOTE(i, 3) -> vote(i, 3) }
#endif
#if N > 4
	:: d_step { MAY_VOTE(i, 4) -> vote(i, 4) }
#endif
	:: d_step { role[i] == CANDIDATE && last[i] < LEN && QUORUM(VOTESFOR(term[i], i), CONFIG(i)) -> lead(i) }

	/* The log. */
	:: d_step { role[i] == LEADER && GUIDE(term[i] > 1) && writes < WRITES && sentLast[term[i]] < LEN ->
		writes++;
		append(i, writes);
		proposer[writes] = i + 1;
		proposedAt[writes] = sentLast[term[i]];
		printf("replica %d: proposes write %d at index %d\n", i, writes, sentLast[term[i]]) }
	:: d_step { sentLast[term[i]] > 0 -> store(i) }
	:: d_step { role[i] == LEADER && commit[i] < sentLast[term[i]] ->
		nextCommit(i);
		if :: n > 0 -> choose(i) :: else fi }
	:: d_step { role[i] == FOLLOWER && sentCommit[term[i]] > commit[i] -> learnCommit(i) }
	:: d_step { MAY_APPLY(i) -> apply(i) }
#ifdef RECONFIG
	/* The leader begins the change, and ends it when the beginning is applied. */
	:: d_step { role[i] == LEADER && served[i] != 0 && config[i] < 2 && sentLast[term[i]] < LEN ->
		n = 0;
		k = applied[i];
		do
		:: k < sentLast[term[i]] -> n = n + IS_CHANGE(SENT(term[i], k)); k++
		:: else -> break
		od;
		if :: n == 0 -> append(i, BOTH + config[i]); printf("replica %d: proposes configuration %d\n", i, config[i] + 1) :: else fi }
#endif
	/* The disk has the commit index that came with its entries, or a later one. */
	:: d_step { crashes < CRASHES -> crash(i) }
	:: d_step { crashes < CRASHES -> crash(i); carry(i); commit[i] = n }
	od
}

/* A writer is answered when its entry is applied; of another entry in its place it learns nothing. */
#ifdef ACKNOWLEDGED_EARLY
#define MAY_ANSWER(i, at) (commit[i] >= at && last[i] >= at)
#else
#define MAY_ANSWER(i, at) (applied[i] >= at)
#endif

inline answer(w) {
	e = LOG(proposer[w] - 1, proposedAt[w] - 1);
#ifdef OLD_TERM_ACKNOWLEDGED
	e = w;
#endif
	if
	:: KIND(e) == w ->
		assert(proposedAt[w] <= chosenLast && KIND(chosen[proposedAt[w] - 1]) == w);	/* acknowledged, so committed */
		printf("writer: write %d at index %d is acknowledged\n", w, proposedAt[w]);
		if :: proposedAt[w] > floor -> floor = proposedAt[w] :: else fi
	:: else
	fi;
	proposer[w] = 0;
	proposedAt[w] = 0
}

proctype Writers() {
end:	do
	:: d_step { proposer[1] != 0 && MAY_ANSWER(proposer[1] - 1, proposedAt[1]) -> answer(1) }
#if WRITES > 1
	:: d_step { proposer[2] != 0 && MAY_ANSWER(proposer[2] - 1, proposedAt[2]) -> answer(2) }
#endif
#if WRITES > 2
	:: d_step { proposer[3] != 0 && MAY_ANSWER(proposer[3] - 1, proposedAt[3]) -> answer(3) }
#endif
	od
}

inline read(upTo) {
	k = upTo;
	do
	:: k > 1 && !IS_WRITE(LOG(L, k - 1)) -> k--
	:: else -> break
	od;
	getIndex = k;
	printf("get: reads replica %d, which shows index %d\n", L, k);
	getKind = (k > 1 -> KIND(LOG(L, k - 1)) : 0)
}

/* What shows what everybody may see, and nothing newer, can neither break nor change anything. */
inline drop() {
	if
	:: getIndex >= getFloor && getIndex <= floor && (getIndex == 1 || KIND(chosen[getIndex - 1]) == getKind) -> endGet()
	:: else
	fi
}

inline start(t) {
	getTerm = t;
	getFloor = floor;
	printf("get: begins by the route to %d, term %d; everybody may know index %d\n", L, t, floor);
#ifdef CONFIRMATION_REUSED
	getSeen = BIT(N) - 1;
#endif
#ifdef CONFIG_NOT_CHECKED
	getConfig = routeConfig[t];
#elif defined(RECONFIG)
	getConfig = config[L];	/* a get with an older one is refused */
#endif
}

#ifdef RECORD_FIRST
#define OBJECT_TURN HAVE_FIRST
#define RECORD_TURN STARTED
#else
#define OBJECT_TURN STARTED
#define RECORD_TURN HAVE_FIRST
#endif

#if defined(RECONFIG) && !defined(CONFIG_NOT_CHECKED)
#define SAME_CONFIG(i) (config[i] == getConfig)
#else
#define SAME_CONFIG(i) true
#endif
#ifdef NOT_CONFIRMED
#define GOOD_RECORD(i) true
#elif defined(SERVED_NOT_CHECKED)
#define GOOD_RECORD(i) (shownTerm[i] <= getTerm)
#else
#define GOOD_RECORD(i) (shownTerm[i] <= getTerm && served[i] == getTerm && SAME_CONFIG(i))
#endif

/* Who shows a term that is not above t. */
#ifdef FROZEN
#define SHOWS(v, t) (shownTerm[v] <= t || (frozen == v + 1 && frozenTerm <= t))
#else
#define SHOWS(v, t) (shownTerm[v] <= t)
#endif
#define ONE_SIDED (get <= HAVE_BOTH)
#define MAY_ASK(v) (v != L && !(getSeen & BIT(v)) && (ONE_SIDED && SHOWS(v, getTerm) || get == ASKED && term[v] == getTerm))

#ifdef NOT_CONFIRMED
#define CONFIRMED true
#elif defined(ONE_SHORT)
#define CONFIRMED (2 * (SIZE(getSeen | BIT(L)) + 1) > N)
#else
#define CONFIRMED QUORUM(getSeen | BIT(L), getConfig)
#endif

inline accept() {
	if
	:: get == HAVE_BOTH && CONFIRMED -> reveal()
	:: else
	fi
}

inline ask(v) {
	printf("get: replica %d shows term %d\n", v, shownTerm[v]);
	getSeen = getSeen | BIT(v);
	if
	:: get == ASKED && QUORUM(getSeen | BIT(L), CONFIG(L)) && leaderOf[getTerm] != 0 -> get = QUORUM_HEARD; getSeen = 0
	:: get == ASKED && leaderOf[getTerm] == 0 -> endGet()
	:: ONE_SIDED && CONFIRMED -> getSeen = BIT(N) - 1	/* who it was no longer matters */
	:: else
	fi;
	accept()
}

#ifdef ENGINE_AHEAD
#define ENGINE(i) (applied[i] + (applied[i] < commit[i] && applied[i] < last[i]))
#else
#define ENGINE(i) applied[i]
#endif
#ifdef LEADER_NOT_ASKED_AGAIN
#define STILL_SERVED true
#else
#define STILL_SERVED (served[L] == getTerm)
#endif

/* A get begins with the first of its READs: one that begins earlier has less to fulfil. Its route was
 * complete before: somebody had seen the term served. */
#define OBJECT read(applied[L]); get = OBJECT_TURN + 1; drop()
#define BEGIN(t) \
	:: d_step { get == IDLE && GUIDE(floor > 1) && route[t] != 0 -> start(t); get = STARTED; if :: OBJECT_TURN == STARTED -> OBJECT :: else fi } \
	:: d_step { get == IDLE && GUIDE(floor > 1) && route[t] != 0 && served[route[t] - 1] == t -> start(t); getIndex = commit[L]; get = ASKED }
#define BEGIN_ASKING(t, v) \
	:: d_step { get == IDLE && GUIDE(floor > 1) && route[t] != 0 && route[t] != v + 1 && SHOWS(v, t) -> start(t); get = STARTED; ask(v) }
#define ASK(v) :: d_step { get != IDLE && MAY_ASK(v) -> ask(v) }
#if TERMS > 2
#define BEGIN_ALL(v) BEGIN_ASKING(1, v) BEGIN_ASKING(2, v) BEGIN_ASKING(3, v)
#else
#define BEGIN_ALL(v) BEGIN_ASKING(1, v) BEGIN_ASKING(2, v)
#endif

proctype Reader() {
end:	do
	BEGIN(1)
	BEGIN(2)
#if TERMS > 2
	BEGIN(3)
#endif
	BEGIN_ALL(0) ASK(0)
	BEGIN_ALL(1) ASK(1)
	BEGIN_ALL(2) ASK(2)
#if N > 3
	BEGIN_ALL(3) ASK(3)
#endif
#if N > 4
	BEGIN_ALL(4) ASK(4)
#endif
	/* One-sided. */
	:: d_step { get == OBJECT_TURN -> OBJECT; accept() }
	:: d_step { get == RECORD_TURN && GOOD_RECORD(L) -> printf("get: the record of %d is good\n", L); get = RECORD_TURN + 1; accept() }
	/* Over gRPC: what is read in the engine is answered if the term is served still. */
	:: d_step { get == QUORUM_HEARD && applied[L] >= getIndex -> read(ENGINE(L)); get = ENGINE_READ; drop() }
	:: d_step { get == ENGINE_READ && STILL_SERVED -> reveal() }
	:: d_step { get != IDLE -> endGet() }	/* refused, or given up */
	od
}

init {
	d_step {
		k = 0;
		do
		:: k < N -> LOG(k, 0) = ENTRY(1, EMPTY); ACKED(1, k) = 1; k++
		:: else -> break
		od;
		chosen[0] = ENTRY(1, EMPTY);
		SENT(1, 0) = ENTRY(1, EMPTY);
		sentLast[1] = 1;
		sentCommit[1] = 1;
		role[0] = LEADER;
		leaderOf[1] = 1;
		served[0] = 1;
		route[1] = 1;
		k = 0
	}
	atomic {
		n = 0;
		do
		:: n < N -> run Replica(n); n++
		:: else -> break
		od;
		run Writers();
		run Reader()
	}
}
