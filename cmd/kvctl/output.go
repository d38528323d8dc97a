package main

import (
	"encoding/base64"
	"encoding/json"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/jedib0t/go-pretty/v6/table"

	"github.com/kvd-io/kvd/client"
)

func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

func newTable(w io.Writer, header ...any) table.Writer {
	t := table.NewWriter()
	t.SetOutputMirror(w)
	t.SetStyle(table.StyleLight)
	t.Style().Options.SeparateRows = false
	t.AppendHeader(header)
	return t
}

// printableKey shows a key on a terminal: as it is where it is plain text, quoted
// where it could do harm or be misread.
func printableKey(key []byte) string {
	s := string(key)
	if utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return s
	}
	return strconv.Quote(s)
}

// keyJSON is the key as a JSON string can hold it; keyBase64 is exact where that is
// not.
func keyJSON(key string) string { return strings.ToValidUTF8(key, "\uFFFD") }

func keyBase64(key []byte) string {
	if utf8.Valid(key) {
		return ""
	}
	return base64.StdEncoding.EncodeToString(key)
}

func valueJSON(key string, v client.Value) any {
	j := struct {
		Key       string `json:"key"`
		KeyBase64 string `json:"key_base64,omitempty"`
		Value     string `json:"value_base64"`
		Size      int    `json:"size"`
		Version   uint64 `json:"version"`
		Expires   string `json:"expires,omitempty"`
	}{keyJSON(key), keyBase64([]byte(key)), base64.StdEncoding.EncodeToString(v.Data), len(v.Data), v.Version, ""}
	if !v.Expires.IsZero() {
		j.Expires = v.Expires.Format(time.RFC3339Nano)
	}
	return j
}
