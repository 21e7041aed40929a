package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/simgpu/simgpu/deviceapi"
	"github.com/simgpu/simgpu/modelserver"
)

// The tests run this command as a process of its own, against a device server in the
// test and a stand-in for llm-d-inference-sim. The test binary is all three: links
// with these names decide which.
const (
	asCommand   = "vllm"
	asInit      = "vllm-as-init" // inherits orphans, as the pid 1 of a container does
	asSimulator = "llm-d-inference-sim"
	asParent    = "short-lived-parent"
	asOrphan    = "orphan"
)

func TestMain(m *testing.M) {
	switch filepath.Base(os.Args[0]) {
	case asCommand:
		main()
	case asInit:
		const prSetChildSubreaper = 36
		if _, _, errno := syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0); errno != 0 {
			panic(errno)
		}
		opts, err := modelserver.OptionsFromEnv(os.LookupEnv)
		if err != nil {
			panic(err)
		}
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, syscall.SIGTERM)
		opts.Args, opts.Stdout, opts.Stderr, opts.Signals = os.Args[1:], os.Stdout, os.Stderr, signals
		opts.Environ, opts.ReapChildren = os.Environ(), true
		os.Exit(exitCode(modelserver.Run(context.Background(), opts)))
	case asSimulator:
		simulate()
	case asParent:
		startAs(asOrphan, strconv.Itoa(os.Getpid()))
	case asOrphan:
		for strconv.Itoa(os.Getppid()) == os.Args[1] {
			runtime.Gosched()
		}
		fmt.Println("orphan", os.Getpid())
	default:
		os.Exit(m.Run())
	}
}

// record is what the stand-in writes down at its start.
type record struct {
	Args  []string
	PodIP string
}

// simulate stands in for llm-d-inference-sim: /health says yes, /exit?code=N ends it,
// and SIGTERM ends it with 0 and a word on standard output.
func simulate() {
	dir, port := os.Getenv("STAND_IN_DIR"), ""
	for _, arg := range os.Args[1:] {
		if value, ok := strings.CutPrefix(arg, "--port="); ok {
			port = value
		}
	}
	data, _ := json.Marshal(record{os.Args[1:], os.Getenv("POD_IP")})
	if err := os.WriteFile(filepath.Join(dir, "record"), data, 0o600); err != nil {
		panic(err)
	}
	if os.Getenv("STAND_IN_ORPHAN") != "" {
		startAs(asParent)
	}
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM)
	go func() {
		<-signals
		fmt.Println("simulator got SIGTERM")
		os.Exit(0)
	}()
	http.HandleFunc("/health", func(http.ResponseWriter, *http.Request) {})
	http.HandleFunc("/exit", func(_ http.ResponseWriter, r *http.Request) {
		code, _ := strconv.Atoi(r.FormValue("code"))
		os.Exit(code)
	})
	panic(http.ListenAndServe("127.0.0.1:"+port, nil))
}

// startAs runs this binary in another role and leaves it alone.
func startAs(role string, args ...string) {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	if _, err := os.StartProcess(self, append([]string{role}, args...), &os.ProcAttr{Env: os.Environ(), Files: []*os.File{nil, os.Stdout, os.Stderr}}); err != nil {
		panic(err)
	}
}

var partition = deviceapi.Device{
	GPU: deviceapi.GPU{
		UUID: "GPU-11111111-1111-1111-1111-111111111111", ProductName: "NVIDIA H100 80GB HBM3",
		MIGMode: deviceapi.MIGEnabled, MemoryBytes: 81559 * deviceapi.MiB,
	},
	Partition: &deviceapi.Partition{
		UUID: "MIG-22222222-2222-2222-2222-222222222222", Profile: "3g.40gb",
		GPUInstanceID: 1, MemoryBytes: 40448 * deviceapi.MiB,
	},
}

// container is what a pod's container is given: a folder with devices, programs, and a
// free port.
type container struct {
	t       *testing.T
	devices string // SIMGPU_DIR
	driver  *deviceapi.Server
	bin     string
	records string
	port    string
}

// newContainer returns a container that sees the given devices.
func newContainer(t *testing.T, devices ...deviceapi.Device) *container {
	t.Helper()
	// The path of a socket has to be short.
	dir, err := os.MkdirTemp("", "vllm") //nolint:usetesting // t.TempDir names the test in its path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(listener.Addr().String())
	listener.Close()

	c := &container{t: t, devices: dir, bin: t.TempDir(), records: t.TempDir(), port: port}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{asCommand, asInit, asSimulator} {
		if err := os.Symlink(self, filepath.Join(c.bin, name)); err != nil {
			t.Fatal(err)
		}
	}
	c.startDriver(devices...)
	t.Cleanup(func() { c.driver.Stop() })
	return c
}

// startDriver serves the devices, as a driver does after a restart too.
func (c *container) startDriver(devices ...deviceapi.Device) {
	c.t.Helper()
	c.driver = deviceapi.NewServer(deviceapi.ServerOptions{Grace: -1})
	for i, d := range devices {
		if err := c.driver.Open(filepath.Join(c.devices, strconv.Itoa(i)), d); err != nil {
			c.t.Fatal(err)
		}
	}
}

// server is a running command.
type server struct {
	*exec.Cmd
	stdout, stderr output
}

// run starts the command. Environment variables stand before the words of its
// command line.
func (c *container) run(role string, words ...string) *server {
	c.t.Helper()
	s := &server{Cmd: &exec.Cmd{Path: filepath.Join(c.bin, role), Args: []string{role}}}
	s.Env = []string{"PATH=" + c.bin, "SIMGPU_DIR=" + c.devices, "STAND_IN_DIR=" + c.records}
	for len(words) > 0 && !strings.HasPrefix(words[0], "-") && strings.Contains(words[0], "=") {
		s.Env, words = append(s.Env, words[0]), words[1:]
	}
	s.Args = append(s.Args, words...)
	s.Stdout, s.Stderr = &s.stdout, &s.stderr
	if err := s.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		_ = s.Process.Kill()
		_ = s.Wait()
		if c.t.Failed() {
			c.t.Logf("stdout of %s:\n%s\nstderr:\n%s", role, s.stdout.String(), s.stderr.String())
		}
	})
	return s
}

// output is a buffer that is read while a process writes to it.
type output struct {
	mu   sync.Mutex
	data bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.data.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.data.String()
}

// waitFor waits for a condition that another process brings about.
func (c *container) waitFor(what string, met func() bool) {
	c.t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	vain := time.After(time.Minute)
	for !met() {
		select {
		case <-tick.C:
		case <-vain:
			c.t.Fatalf("waited in vain for %s", what)
		}
	}
}

func (c *container) get(path string) error {
	response, err := http.Get("http://127.0.0.1:" + c.port + path)
	if err == nil {
		response.Body.Close()
	}
	return err
}

func (c *container) waitHealthy() {
	c.t.Helper()
	c.waitFor("/health", func() bool { return c.get("/health") == nil })
}

// held is what processes hold of all devices.
func (c *container) held() []deviceapi.Process {
	c.t.Helper()
	client, err := deviceapi.Discover(c.devices, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	defer client.Close()
	snapshot, err := client.Snapshot(c.t.Context())
	if err != nil {
		c.t.Fatal(err)
	}
	var held []deviceapi.Process
	for _, gpu := range snapshot.GPUs {
		held = append(held, gpu.Processes...)
		for _, p := range gpu.Partitions {
			held = append(held, p.Processes...)
		}
	}
	return held
}

// exit waits for the end of the command.
func (c *container) exit(s *server) int {
	c.t.Helper()
	err := s.Wait()
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		c.t.Fatal(err)
	}
	return s.ProcessState.ExitCode()
}

// article is the command line of the two Llamas on one H100.
func (c *container) article() []string {
	return []string{
		"serve", "meta-llama/Meta-Llama-3.1-8B-Instruct",
		"--disable-access-log-for-endpoints=/health,/metrics,/v1/models",
		"--tensor-parallel-size=1", "--gpu-memory-utilization=0.9", "--max-model-len=4096",
		"--port=" + c.port,
	}
}

func (c *container) expect(what, got string, parts ...string) {
	c.t.Helper()
	for _, part := range parts {
		if !strings.Contains(got, part) {
			c.t.Errorf("%s lacks %q:\n%s", what, part, got)
		}
	}
}

func TestServesOnTheClaimedPartition(t *testing.T) {
	c := newContainer(t, partition)
	s := c.run(asCommand, c.article()...)
	c.waitHealthy()

	want := []deviceapi.Process{{PID: s.Process.Pid, Name: "python3", Memory: 15023 * deviceapi.MiB}}
	if diff := cmp.Diff(want, c.held()); diff != "" {
		t.Errorf("holders of the partition (-want +got):\n%s", diff)
	}
	data, err := os.ReadFile(filepath.Join(c.records, "record"))
	if err != nil {
		t.Fatal(err)
	}
	var got record
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	for _, arg := range []string{
		"--model=meta-llama/Meta-Llama-3.1-8B-Instruct", "--force-dummy-tokenizer",
		"--port=" + c.port, "--max-model-len=4096", "--kv-cache-size=10690",
	} {
		if !slices.Contains(got.Args, arg) {
			t.Errorf("simulator runs without %s: %q", arg, got.Args)
		}
	}
	if net.ParseIP(got.PodIP) == nil {
		t.Errorf("simulator runs with POD_IP %q, want an address", got.PodIP)
	}

	c.waitFor("the log to say that it is ready", func() bool { return strings.Contains(s.stdout.String(), "Ready to accept inference requests") })
	c.expect("log", s.stdout.String(),
		"INFO ", "MIG 3g.40gb (UUID: "+partition.UUID()+"), 39.50 GiB free of 39.50 GiB",
		"--disable-access-log-for-endpoints=/health,/metrics,/v1/models",
		"Model loaded successfully", "14.67 GiB",
		"GPU KV cache size: 171,040 tokens", "Maximum concurrency for 4,096 tokens per request: 41.76x",
		"Starting vLLM server on http://0.0.0.0:"+c.port)

	if err := s.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := c.exit(s); code != 0 {
		t.Errorf("exit code %d after SIGTERM, want 0", code)
	}
	c.expect("output", s.stdout.String(), "simulator got SIGTERM")
	c.waitFor("the memory to be free", func() bool { return len(c.held()) == 0 })
}

func TestExitCodes(t *testing.T) {
	small := partition
	small.Partition = &deviceapi.Partition{UUID: partition.UUID(), Profile: "1g.10gb", MemoryBytes: 9984 * deviceapi.MiB}
	for name, test := range map[string]struct {
		devices []deviceapi.Device
		words   []string // before the port
		code    int
		stderr  []string
	}{
		"a value that cannot be": {
			[]deviceapi.Device{partition}, []string{"serve", "m", "--dtype", "int3"}, 2, []string{"--dtype", `"int3"`, "bfloat16"}},
		"an environment that cannot be": {
			[]deviceapi.Device{partition}, []string{"SIMGPU_MODEL_MEMORY=much", "serve", "m"}, 1, []string{"SIMGPU_MODEL_MEMORY", `"much"`}},
		"no device": {
			nil, []string{"serve", "meta-llama/Llama-3.1-8B"}, 1, []string{"RuntimeError: No CUDA GPUs are available"}},
		"a model nobody knows": {
			[]deviceapi.Device{partition}, []string{"serve", "acme/foo"}, 1, []string{"acme/foo", "SIMGPU_MODEL_MEMORY"}},
		"a model that does not fit": {
			[]deviceapi.Device{small}, []string{"serve", "meta-llama/Llama-3.1-8B"}, 1, []string{"torch.OutOfMemoryError: CUDA out of memory", "14.67 GiB", "9.75 GiB"}},
		"two devices wanted": {
			[]deviceapi.Device{partition}, []string{"serve", "meta-llama/Llama-3.1-8B", "-tp", "2"}, 1, []string{"ValueError: World size 2"}},
		"no simulator": {
			[]deviceapi.Device{partition}, []string{"SIMGPU_INFERENCE_SIM=/nowhere", "serve", "m-7b"}, 1, []string{"SIMGPU_INFERENCE_SIM", "/nowhere"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := newContainer(t, test.devices...)
			s := c.run(asCommand, append(test.words, "--port="+c.port)...)
			if code := c.exit(s); code != test.code {
				t.Errorf("exit code %d, want %d", code, test.code)
			}
			c.expect("standard error", s.stderr.String(), test.stderr...)
			if _, err := os.Stat(filepath.Join(c.records, "record")); err == nil {
				t.Error("the simulator was started")
			}
		})
	}
}

func TestSimulatorThatEndsByItself(t *testing.T) {
	for _, test := range []struct{ ends, want int }{
		{ends: 7, want: 7},
		{ends: 0, want: 1}, // so it ends at a bad configuration
	} {
		c := newContainer(t, partition)
		s := c.run(asCommand, c.article()...)
		c.waitHealthy()
		_ = c.get("/exit?code=" + strconv.Itoa(test.ends)) // its answer never comes
		if code := c.exit(s); code != test.want {
			t.Errorf("exit code %d after the simulator's %d, want %d", code, test.ends, test.want)
		}
		c.expect("standard error", s.stderr.String(), "API server", "exit code "+strconv.Itoa(test.ends))
	}
}

func TestWithoutADevice(t *testing.T) {
	for name, words := range map[string][]string{
		"allowed by the environment": {"SIMGPU_ALLOW_NO_DEVICE=1", "serve", "acme/foo"},
		"on the CPU":                 {"serve", "acme/foo", "--device", "cpu"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newContainer(t)
			s := c.run(asCommand, append(words, "--port="+c.port)...)
			c.waitHealthy()
			c.expect("log", s.stdout.String(), "WARNING", "without a device")
		})
	}
}

func TestReservesTheKVCacheOnDemand(t *testing.T) {
	c := newContainer(t, partition)
	c.run(asCommand, append([]string{"SIMGPU_RESERVE_KV_CACHE=1"}, c.article()...)...)
	c.waitHealthy()
	total := partition.MemoryBytes()
	if held := c.held(); len(held) != 1 || held[0].Memory != int64(0.9*float64(total)) {
		t.Errorf("held: %+v, want one process with 90 %% of %d", held, total)
	}
}

func TestTensorParallelHoldsOnEachGPU(t *testing.T) {
	one, two := partition, partition
	one.Partition, two.Partition = nil, nil
	one.GPU.MIGMode, two.GPU.MIGMode = deviceapi.MIGDisabled, deviceapi.MIGDisabled
	two.GPU.UUID, two.GPU.Minor = "GPU-33333333-3333-3333-3333-333333333333", 1
	c := newContainer(t, one, two)
	s := c.run(asCommand, "serve", "hf://Qwen/Qwen2.5-7B-Instruct", "-tp", "2", "--port", c.port)
	c.waitHealthy()
	share := deviceapi.Process{PID: s.Process.Pid, Name: "python3", Memory: 7263 * deviceapi.MiB}
	if diff := cmp.Diff([]deviceapi.Process{share, share}, c.held()); diff != "" {
		t.Errorf("holders (-want +got):\n%s", diff)
	}
}

func TestStopDuringLoad(t *testing.T) {
	c := newContainer(t, partition)
	s := c.run(asCommand, append([]string{"SIMGPU_LOAD_DURATION=1h"}, c.article()...)...)
	c.waitFor("the memory to be held", func() bool { return len(c.held()) == 1 })
	if c.get("/health") == nil {
		t.Error("/health answers while the model loads")
	}
	if err := s.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := c.exit(s); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

func TestHoldsThroughARestartOfTheDriver(t *testing.T) {
	c := newContainer(t, partition)
	s := c.run(asCommand, c.article()...)
	c.waitHealthy()
	before := c.held()

	c.driver.Stop()
	if err := c.get("/health"); err != nil {
		t.Errorf("without a driver: %v", err)
	}
	c.startDriver(partition)
	c.waitFor("the memory to be held again", func() bool { return cmp.Equal(before, c.held()) })
	if err := s.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the server is gone: %v", err)
	}
}

func TestStopsWhenItsMemoryIsLost(t *testing.T) {
	unprepare := func(c *container) {
		if err := c.driver.Close(filepath.Join(c.devices, "0")); err != nil {
			c.t.Fatal(err)
		}
	}
	shrink := func(c *container) {
		c.driver.Stop()
		small := partition
		small.Partition = &deviceapi.Partition{UUID: partition.UUID(), MemoryBytes: deviceapi.MiB}
		c.startDriver(small)
	}
	lost := "RuntimeError: CUDA error: the memory of this server on " + partition.UUID() + " is lost: "
	tests := map[string]struct {
		env      []string
		lose     func(*container)
		says     string
		simulate bool // the simulator runs by then
	}{
		"the device was unprepared": {nil, unprepare, lost + "the device is gone", true},
		"the memory fits no more":   {nil, shrink, lost + "out of memory", true},
		"unprepared while it loads": {[]string{"SIMGPU_LOAD_DURATION=1h"}, unprepare, "the device is gone", false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			c := newContainer(t, partition)
			s := c.run(asCommand, append(test.env, c.article()...)...)
			if test.simulate {
				c.waitHealthy()
			}
			c.waitFor("the memory to be held", func() bool { return len(c.held()) == 1 })
			test.lose(c)
			if code := c.exit(s); code != 1 {
				t.Errorf("exit code %d, want 1", code)
			}
			c.expect("stderr", s.stderr.String(), test.says)
			if got := strings.Contains(s.stdout.String(), "simulator got SIGTERM"); got != test.simulate {
				t.Errorf("the simulator was stopped: %t, want %t", got, test.simulate)
			}
			if c.get("/health") == nil {
				t.Error("the simulator outlives the server")
			}
		})
	}
}

func TestReapsOrphans(t *testing.T) {
	c := newContainer(t, partition)
	s := c.run(asInit, append([]string{"STAND_IN_ORPHAN=1"}, c.article()...)...)
	c.waitHealthy()
	var orphan string
	c.waitFor("the orphan to end", func() bool {
		_, after, found := strings.Cut(s.stdout.String(), "orphan ")
		orphan, _, _ = strings.Cut(after, "\n")
		return found && orphan != ""
	})
	// A process that ended and is not waited for keeps its place.
	c.waitFor("the orphan to be reaped", func() bool {
		_, err := os.Stat("/proc/" + orphan)
		return errors.Is(err, os.ErrNotExist)
	})
	if err := s.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if code := c.exit(s); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}

func TestEndsWithItsParent(t *testing.T) {
	c := newContainer(t, partition)
	s := c.run(asCommand, c.article()...)
	c.waitHealthy()
	if err := s.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	c.waitFor("the simulator to end", func() bool { return c.get("/health") != nil })
	c.waitFor("the memory to be free", func() bool { return len(c.held()) == 0 })
}
