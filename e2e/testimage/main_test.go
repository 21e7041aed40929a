package main

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPrograms(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "file")
	if err := os.WriteFile(file, []byte("content\n"), 0o640); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/" {
			w.WriteHeader(http.StatusNotFound)
		}
		fmt.Fprint(w, "answer")
	}))
	defer server.Close()
	t.Setenv("TESTIMAGE_A", "value")

	for name, test := range map[string]struct {
		args        []string
		want, wrong string
	}{
		"cat":                   {args: []string{"cat", file, file}, want: "content\ncontent\n"},
		"cat nothing there":     {args: []string{"cat", file + "x"}, wrong: "no such file"},
		"env of one":            {args: []string{"env", "TESTIMAGE_A"}, want: "value\n"},
		"env not set":           {args: []string{"env", "TESTIMAGE_B"}, wrong: "TESTIMAGE_B is not set"},
		"id":                    {args: []string{"id"}, want: fmt.Sprintf("uid=%d gid=%d ", os.Getuid(), os.Getgid())},
		"ls of a folder":        {args: []string{"ls", folder}, want: "-rw-r----- file\n"},
		"ls of a device":        {args: []string{"ls", "/dev/null"}, want: "Dcrw-rw-rw- 1,3 /dev/null\n"},
		"lookup":                {args: []string{"lookup", "127.0.0.1"}, want: "127.0.0.1\n"},
		"sleep":                 {args: []string{"sleep", "0"}},
		"sleep what":            {args: []string{"sleep", "well"}, wrong: "well"},
		"sleep without":         {args: []string{"sleep"}, wrong: "expected"},
		"wget":                  {args: []string{"wget", server.URL}, want: "answer"},
		"wget refused":          {args: []string{"wget", server.URL + "/x"}, wrong: "404 Not Found: answer"},
		"by the name of a link": {args: []string{"/usr/bin/cat", file}, want: "content\n"},
		"nothing":               {args: nil, wrong: "cat, env, id, lookup, ls, serve, sleep, tar, wget"},
		"unknown":               {args: []string{"vi"}, wrong: `"vi"`},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			err := run(test.args, &out)
			if test.wrong == "" && err != nil || test.wrong != "" && (err == nil || !strings.Contains(err.Error(), test.wrong)) {
				t.Errorf("got error %v, want %q", err, test.wrong)
			}
			if !strings.HasPrefix(out.String(), test.want) {
				t.Errorf("got %q, want %q", out.String(), test.want)
			}
		})
	}
}

func TestEnvIsSorted(t *testing.T) {
	t.Setenv("TESTIMAGE_B", "2")
	t.Setenv("TESTIMAGE_A", "1")
	var out strings.Builder
	if err := run([]string{"env"}, &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "TESTIMAGE_A=1\nTESTIMAGE_B=2\n") {
		t.Errorf("got %q", out.String())
	}
}

func TestTarThereAndBack(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	if err := os.MkdirAll(filepath.Join(from, "a/b"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(from, "a/b/file"), []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	packed := filepath.Join(t.TempDir(), "packed.tar")
	out, err := os.Create(packed)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if err := archive([]string{"cf", "-", "-C", from, "a"}, out); err != nil {
		t.Fatal(err)
	}
	in, err := os.Open(packed)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	stdin := os.Stdin
	os.Stdin = in
	defer func() { os.Stdin = stdin }()
	if err := archive([]string{"xmf", "-", "-C", to}, nil); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(filepath.Join(to, "a/b/file"))
	if err != nil || string(got) != "content" {
		t.Errorf("got %q, %v", got, err)
	}
}
