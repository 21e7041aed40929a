// Command testimage is what containers of tests run: the few programs of a shell that tests need, in one static
// executable without a shell. It acts as the program it is called by: testimage NAME ARGUMENT..., or a link NAME.
package main

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// program does its work with the arguments after its name.
type program func(args []string, out io.Writer) error

// programs by their names.
var programs = map[string]program{
	"cat":    cat,
	"env":    env,
	"id":     id,
	"lookup": lookup,
	"ls":     ls,
	"serve":  serve,
	"sleep":  sleep,
	"tar":    archive,
	"wget":   wget,
}

func main() {
	args := os.Args
	if _, ok := programs[filepath.Base(args[0])]; !ok {
		args = args[1:]
	}
	if err := run(args, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "testimage:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	known := strings.Join(slices.Sorted(maps.Keys(programs)), ", ")
	if len(args) == 0 {
		return fmt.Errorf("expected a program: %s", known)
	}
	do, ok := programs[filepath.Base(args[0])]
	if !ok {
		return fmt.Errorf("no program %q, only %s", args[0], known)
	}
	return do(args[1:], out)
}

// cat writes files one after the other.
func cat(paths []string, out io.Writer) error {
	for _, path := range paths {
		file, err := os.Open(path)
		if err != nil {
			return err
		}
		_, err = io.Copy(out, file)
		if err := errors.Join(err, file.Close()); err != nil {
			return err
		}
	}
	return nil
}

// env writes all variables, sorted, or the values of those named. A variable that is not set is an error.
func env(names []string, out io.Writer) error {
	if len(names) == 0 {
		for _, variable := range slices.Sorted(slices.Values(os.Environ())) {
			fmt.Fprintln(out, variable)
		}
		return nil
	}
	for _, name := range names {
		value, ok := os.LookupEnv(name)
		if !ok {
			return fmt.Errorf("%s is not set", name)
		}
		fmt.Fprintln(out, value)
	}
	return nil
}

// id writes who runs this.
func id(_ []string, out io.Writer) error {
	groups, err := os.Getgroups()
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "uid=%d gid=%d groups=%s\n", os.Getuid(), os.Getgid(), strings.Join(strings.Fields(strings.Trim(fmt.Sprint(groups), "[]")), ","))
	return nil
}

// ls writes the mode and name of what is in folders, and of files themselves; of devices their numbers too.
func ls(paths []string, out io.Writer) error {
	if len(paths) == 0 {
		paths = []string{"."}
	}
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			describe(out, path, info)
			continue
		}
		entries, err := os.ReadDir(path)
		if err != nil {
			return err
		}
		for _, entry := range entries {
			info, err := entry.Info()
			if err != nil {
				return err
			}
			describe(out, entry.Name(), info)
		}
	}
	return nil
}

func describe(out io.Writer, name string, info fs.FileInfo) {
	device := ""
	if stat, ok := info.Sys().(*syscall.Stat_t); ok && info.Mode()&fs.ModeDevice != 0 {
		// The kernel's encoding of device numbers: 8 bits of each half in the low 16, the rest above.
		major := stat.Rdev>>8&0xfff | stat.Rdev>>32&^0xfff
		minor := stat.Rdev&0xff | stat.Rdev>>12&^0xff
		device = fmt.Sprintf(" %d,%d", major, minor)
	}
	fmt.Fprintf(out, "%s%s %s\n", info.Mode(), device, name)
}

// lookup writes the addresses of a host name, sorted.
func lookup(names []string, out io.Writer) error {
	for _, name := range names {
		addresses, err := net.LookupHost(name)
		if err != nil {
			return err
		}
		slices.Sort(addresses)
		fmt.Fprintln(out, strings.Join(addresses, " "))
	}
	return nil
}

// serve answers every HTTP request at an address with the host name, until it is told to end.
func serve(args []string, out io.Writer) error {
	if len(args) != 1 {
		return errors.New("serve: expected an address such as :8080")
	}
	host, err := os.Hostname()
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "serving", args[0])
	return http.ListenAndServe(args[0], http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(out, r.Method, r.URL.Path)
		fmt.Fprintln(w, host)
	}))
}

// sleep waits for a number of seconds, a duration such as 1m, or for ever ("infinity"), or until it is told to end.
func sleep(args []string, _ io.Writer) error {
	if len(args) != 1 {
		return errors.New("sleep: expected a duration or infinity")
	}
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGINT, syscall.SIGTERM)
	var done <-chan time.Time
	if args[0] != "infinity" {
		text := args[0]
		if strings.Trim(text, "0123456789.") == "" {
			text += "s"
		}
		duration, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("sleep: %w", err)
		}
		done = time.After(duration)
	}
	select {
	case <-told:
	case <-done:
	}
	return nil
}

// archive does what kubectl cp asks of tar: "cf - PATH" writes files as an archive, "xf - -C FOLDER" unpacks one.
func archive(args []string, out io.Writer) error {
	folder, paths, extract := ".", []string(nil), false
	for i := 0; i < len(args); i++ {
		switch arg := args[i]; {
		case i == 0:
			extract = strings.Contains(arg, "x")
		case arg == "-C" && i+1 < len(args):
			i++
			folder = args[i]
		case arg != "-" && !strings.HasPrefix(arg, "--"):
			paths = append(paths, arg)
		}
	}
	if extract {
		return unpack(tar.NewReader(os.Stdin), folder)
	}
	writer := tar.NewWriter(out)
	for _, path := range paths {
		if err := pack(writer, folder, path); err != nil {
			return err
		}
	}
	return writer.Close()
}

func pack(writer *tar.Writer, folder, path string) error {
	return filepath.WalkDir(filepath.Join(folder, path), func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := entry.Info()
		if err != nil || !info.Mode().IsRegular() && !info.IsDir() {
			return err
		}
		header, err := tar.FileInfoHeader(info, "")
		if err != nil {
			return err
		}
		name, err := filepath.Rel(folder, file)
		if err != nil {
			return err
		}
		header.Name = strings.TrimPrefix(name, "/")
		if err := writer.WriteHeader(header); err != nil || info.IsDir() {
			return err
		}
		return cat([]string{file}, writer)
	})
}

func unpack(reader *tar.Reader, folder string) error {
	root, err := os.OpenRoot(folder)
	if err != nil {
		return err
	}
	defer root.Close()
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		name := filepath.Clean(header.Name)
		if header.Typeflag == tar.TypeDir {
			if err := root.MkdirAll(name, 0o755); err != nil {
				return err
			}
			continue
		}
		if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		file, err := root.OpenFile(name, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, header.FileInfo().Mode().Perm())
		if err != nil {
			return err
		}
		_, err = io.Copy(file, reader)
		if err := errors.Join(err, file.Close()); err != nil {
			return err
		}
	}
}

// wget writes what is at a URL. An answer other than 2xx is an error that shows the answer.
func wget(urls []string, out io.Writer) error {
	client := &http.Client{Timeout: 10 * time.Second}
	for _, url := range urls {
		response, err := client.Get(url)
		if err != nil {
			return err
		}
		body, err := io.ReadAll(response.Body)
		if err := errors.Join(err, response.Body.Close()); err != nil {
			return err
		}
		if response.StatusCode/100 != 2 {
			return fmt.Errorf("%s: %s: %s", url, response.Status, body)
		}
		if _, err := out.Write(body); err != nil {
			return err
		}
	}
	return nil
}
