// Opening the libraries at run time.
#define _GNU_SOURCE
#include "shim.h"
#include "shim_lib.h"

#include <string.h>

#ifdef KVD_HAVE_VERBS

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

struct kvd_funcs kvd_f;

// The first version of an interface is the one whose structs the header describes;
// libibverbs keeps an older one of some names for programs of 2006.
static void *find(void *lib, const char *name, const char *version)
{
	void *p = NULL;
#ifdef __GLIBC__
	p = dlvsym(lib, name, version);
#else
	(void)version;
#endif
	return p ? p : dlsym(lib, name);
}

static void *open_library(const char *name, const char *probe, kvd_library *out)
{
	void *lib = dlopen(name, RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		const char *why = dlerror();
		snprintf(out->err, sizeof out->err, "%s", why ? why : "dlopen failed");
		return NULL;
	}
	void *p = dlsym(lib, probe);
	Dl_info info;
	if (p && dladdr(p, &info) && info.dli_fname) {
		char real[PATH_MAX];
		snprintf(out->path, sizeof out->path, "%s", realpath(info.dli_fname, real) ? real : info.dli_fname);
	}
	return lib;
}

// What is found stays loaded: the providers that libibverbs loads in turn cannot be
// unloaded safely.
#define LOOKUP(name, result, params) \
	if (!(*(void **)&kvd_f.name = find(lib, #name, version)) && !missing) \
		missing = #name;

static int lookup_verbs(void *lib, kvd_library *out)
{
	const char *version = "IBVERBS_1.1", *missing = NULL;
	KVD_VERBS_FUNCS(LOOKUP)
	*(void **)&kvd_f._ibv_query_gid_ex = find(lib, "_ibv_query_gid_ex", "IBVERBS_1.11");
	if (missing)
		snprintf(out->err, sizeof out->err, "%s lacks %s", out->path, missing);
	return !missing;
}

static int lookup_rdmacm(void *lib, kvd_library *out)
{
	const char *version = "RDMACM_1.0", *missing = NULL;
	KVD_RDMACM_FUNCS(LOOKUP)
	if (missing)
		snprintf(out->err, sizeof out->err, "%s lacks %s", out->path, missing);
	return !missing;
}

void kvd_load(kvd_status *out)
{
	memset(out, 0, sizeof *out);
	out->built = 1;
	void *lib = open_library("libibverbs.so.1", "ibv_open_device", &out->verbs);
	if (lib)
		out->verbs.found = lookup_verbs(lib, &out->verbs);
	lib = open_library("librdmacm.so.1", "rdma_create_id", &out->rdmacm);
	if (lib)
		out->rdmacm.found = lookup_rdmacm(lib, &out->rdmacm);
}

#else

void kvd_load(kvd_status *out) { memset(out, 0, sizeof *out); }

#endif
