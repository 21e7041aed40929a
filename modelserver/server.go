package modelserver

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/simgpu/simgpu/deviceapi"
)

// ProcessName is how the server shows in nvidia-smi: vLLM is a Python program.
const ProcessName = "python3"

// Options configures Run.
type Options struct {
	// Args is the command line after the program name.
	Args []string
	// Stdout gets the server's log and the simulator's output, Stderr the
	// simulator's log.
	Stdout, Stderr *os.File
	// Signals are passed on to the simulator. SIGTERM and SIGINT end a server that
	// is still starting.
	Signals <-chan os.Signal
	// Environ is the environment of the simulator.
	Environ []string
	// ReapChildren is for a process with the pid 1: it waits for every orphan.
	ReapChildren bool

	// DeviceDir is where the sockets of the devices are; empty: deviceapi.DefaultDir.
	DeviceDir string
	// CUDAVisibleDevices as in Visible; nil: not set.
	CUDAVisibleDevices *string
	// AllowNoDevice serves without a device where none is visible.
	AllowNoDevice bool
	// ModelMemory replaces the computed size of the weights in bytes; 0: computed.
	ModelMemory int64
	// ReserveKVCache holds --gpu-memory-utilization of the device, as a real vLLM
	// does, and not the weights alone.
	ReserveKVCache bool
	// LoadDuration is how long the weights take to load; the API is not there before.
	LoadDuration time.Duration
	// Simulator is the path of llm-d-inference-sim; empty: beside this program, else
	// in the PATH.
	Simulator string
	// SimulatorArgs follow the simulator's other arguments and win over them.
	SimulatorArgs []string

	// DevicePatience is how long a start waits for a driver that does not answer;
	// 0: DefaultDevicePatience.
	DevicePatience time.Duration
}

// DefaultDevicePatience covers a restart of the node driver.
const DefaultDevicePatience = 2 * time.Minute

// stopPatience is how long the simulator may take to end when its memory is lost. It
// drains its requests for up to 30 seconds.
const stopPatience = 40 * time.Second

// ExitError is the end of the simulator without being asked, or with a failure.
type ExitError struct {
	// Code is the exit code of this program.
	Code int
	// Status is what became of the simulator: exit code 7, signal killed.
	Status string
}

func (e *ExitError) Error() string {
	return fmt.Sprintf("the API server (%s) ended with %s, see its log above", simulatorName, e.Status)
}

// errStopped is a signal during the start.
var errStopped = errors.New("stopped during start-up")

// Run serves the model until the simulator ends, and returns nil where that was by a
// signal or by ctx. It fails with *UsageError, *RefusalError or *ExitError, or with
// what kept it from starting. The memory is given back in every case.
func Run(ctx context.Context, opts Options) error {
	args, err := ParseArgs(opts.Args)
	if err != nil {
		return err
	}
	if args.Help {
		_, err := fmt.Fprint(opts.Stdout, usage)
		return err
	}
	if args.Version {
		_, err := fmt.Fprintln(opts.Stdout, "vllm-sim (simgpu): stands in for vLLM, serves with "+simulatorName)
		return err
	}
	models, err := LoadModels()
	if err != nil {
		return err
	}
	s := &server{opts: opts, args: args, log: newLogger(opts.Stdout), lost: make(chan error, 1)}
	s.announce()

	// Everything that can be wrong is found before memory is held.
	simulator, err := findSimulator(opts.Simulator)
	if err != nil {
		return err
	}
	err = s.hold(ctx, models)
	defer s.release()
	if err == nil {
		err = s.load(ctx)
	}
	if errors.Is(err, errStopped) {
		s.log.Info("Stopped during start-up")
		return nil
	}
	if err != nil {
		return err
	}
	return s.serve(ctx, simulator)
}

// server is one run.
type server struct {
	opts   Options
	args   Args
	log    *slog.Logger
	client *deviceapi.Client // nil: no device
	plan   Plan
	lost   chan error // what is held and was lost for good
}

func (s *server) infof(format string, a ...any)    { s.log.Info(fmt.Sprintf(format, a...)) }
func (s *server) warningf(format string, a ...any) { s.log.Warn(fmt.Sprintf(format, a...)) }

// announce says what was understood and what was not.
func (s *server) announce() {
	names := ""
	if len(s.args.ServedModelNames) > 0 {
		names = ", served as " + strings.Join(s.args.ServedModelNames, ", ")
	}
	s.infof("vLLM API server, simulated by simgpu: model %s%s", s.args.Model, names)
	if len(s.args.Ignored) > 0 {
		s.infof("Arguments without effect in the simulation: %s", strings.Join(s.args.Ignored, ", "))
	}
	if s.args.APIKey {
		s.warningf("--api-key is not enforced: the simulated API answers everybody")
	}
	if s.args.Host != "0.0.0.0" && s.args.Host != "::" {
		s.warningf("--host %s is not enforced: the simulated API listens on all addresses", s.args.Host)
	}
}

// hold takes the memory of the model on the devices it runs on. The client keeps the
// leases until release, through restarts of the driver.
func (s *server) hold(ctx context.Context, models *Models) error {
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(s.opts.DevicePatience, DefaultDevicePatience))
	defer cancel()
	ctx, stop := s.untilSignal(ctx)
	defer stop()

	visible, err := s.visible(ctx)
	if err != nil {
		return s.startError(ctx, err)
	}
	if len(visible) == 0 && (s.args.Device == "cpu" || s.opts.AllowNoDevice) {
		s.warningf("Running without a device: no memory is held")
		model, _ := models.Footprint(s.args, 1) // of interest is the context length alone
		s.plan, err = Plan{}.withModelLen(s.args, model)
		return err
	}
	for i, d := range visible {
		s.infof("Device cuda:%d: %s (UUID: %s), %s free of %s", i, d.Name, d.UUID, gib(d.FreeBytes()), gib(d.TotalBytes))
	}

	model, err := models.Footprint(s.args, s.opts.ModelMemory)
	if err != nil {
		return err
	}
	if s.plan, err = NewPlan(s.args, model, visible); err != nil {
		return err
	}
	s.infof("Loading weights of %s (%s)", s.args.Model, model.Explanation)
	for i, d := range s.plan.Devices {
		bytes := s.plan.WeightBytes
		if s.opts.ReserveKVCache {
			bytes = int64(s.args.GPUMemoryUtilization * float64(d.TotalBytes))
		}
		lease, err := s.client.Hold(ctx, deviceapi.HoldOptions{Device: d.UUID, MemoryBytes: bytes, ProcessName: ProcessName})
		// Free memory may have changed since the plan.
		if oom := (*deviceapi.OutOfMemoryError)(nil); errors.As(err, &oom) {
			return outOfMemory(s.args, i, d.Name, oom.Requested, oom.Free, oom.Total)
		}
		if err != nil {
			return s.startError(ctx, fmt.Errorf("hold %s of device cuda:%d: %w", gib(bytes), i, err))
		}
		go s.reportLoss(lease)
	}
	return nil
}

// visible finds the devices of the container; none is no error here.
func (s *server) visible(ctx context.Context) ([]Device, error) {
	if s.args.Device == "cpu" {
		return nil, nil
	}
	dir := s.opts.DeviceDir
	if dir == "" {
		dir = deviceapi.DefaultDir
	}
	client, err := deviceapi.Discover(dir, s.log)
	if errors.Is(err, deviceapi.ErrNoDevices) {
		if s.opts.AllowNoDevice {
			return nil, nil
		}
		return nil, tooFewDevices(s.args, nil)
	}
	if err != nil {
		return nil, err
	}
	s.client = client
	snapshot, err := client.Snapshot(ctx)
	if err != nil {
		return nil, err
	}
	return Visible(snapshot, s.opts.CUDAVisibleDevices), nil
}

// startError tells a signal from a failure that came with it.
func (s *server) startError(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), errStopped) {
		return errStopped
	}
	return err
}

// untilSignal ends ctx with errStopped at a signal that asks for the end.
func (s *server) untilSignal(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case sig := <-s.opts.Signals:
				if sig == syscall.SIGTERM || sig == syscall.SIGINT {
					cancel(errStopped)
					return
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-done
	}
}

// load lets the time pass that loading takes, and reports what the real server does.
func (s *server) load(ctx context.Context) error {
	ctx, stop := s.untilSignal(ctx)
	defer stop()
	if s.opts.LoadDuration > 0 {
		select {
		case <-time.After(s.opts.LoadDuration):
		case err := <-s.lost:
			return err
		case <-ctx.Done():
			return errStopped
		}
	}
	if len(s.plan.Devices) > 0 {
		s.infof("Model loaded successfully: model loading took %s per device and %.1f seconds",
			gib(s.plan.WeightBytes), s.opts.LoadDuration.Seconds())
		s.infof("Available KV cache memory: %s", gib(s.plan.KVCacheBytes))
	}
	if s.plan.KVCacheTokens > 0 {
		s.infof("GPU KV cache size: %s tokens", thousands(s.plan.KVCacheTokens))
		s.infof("Maximum concurrency for %s tokens per request: %.2fx", thousands(int64(s.plan.MaxModelLen)),
			float64(s.plan.KVCacheTokens)/float64(s.plan.MaxModelLen))
	}
	if s.plan.ModelLenAssumed {
		s.warningf("The context length of %s is not known, assuming %d tokens: set --max-model-len", s.args.Model, s.plan.MaxModelLen)
	}
	return nil
}

// serve runs the simulator.
func (s *server) serve(ctx context.Context, simulator string) error {
	child, err := startProcess(simulator, simulatorArgs(s.args, s.plan, s.opts.SimulatorArgs),
		simulatorEnv(s.opts.Environ), s.opts.Stdout, s.opts.Stderr, s.opts.ReapChildren)
	if err != nil {
		return err
	}
	watching, stopWatching := context.WithCancel(ctx)
	defer stopWatching()
	go s.reportReady(watching)

	var (
		stopping bool             // the end was asked for
		failure  error            // why it was, where not by a person
		patience <-chan time.Time // until it is no longer asked
		ended    = ctx.Done()
		lost     = s.lost
	)
	for {
		select {
		case status, known := <-child.exited:
			return s.exitError(status, known, stopping, failure)
		case sig := <-s.opts.Signals:
			stopping = stopping || sig == syscall.SIGTERM || sig == syscall.SIGINT
			child.signal(sig)
		case <-ended:
			stopping, ended = true, nil
			child.signal(syscall.SIGTERM)
			patience = time.After(stopPatience)
		case failure = <-lost:
			lost = nil
			s.log.Error("Stopping: " + failure.Error())
			child.signal(syscall.SIGTERM)
			patience = time.After(stopPatience)
		case <-patience:
			child.signal(syscall.SIGKILL)
		}
	}
}

// exitError says what the end of the simulator means.
func (s *server) exitError(status syscall.WaitStatus, known, stopping bool, failure error) error {
	switch {
	case failure != nil:
		return failure
	case !known:
		return errors.New("the API server (" + simulatorName + ") is gone, and its exit code is not known")
	case status.Signaled():
		return &ExitError{Code: 128 + int(status.Signal()), Status: "signal " + status.Signal().String()}
	case status.ExitStatus() != 0:
		return &ExitError{Code: status.ExitStatus(), Status: fmt.Sprintf("exit code %d", status.ExitStatus())}
	case !stopping:
		// It reports a bad configuration or a port in use in its log, and exits with 0.
		return &ExitError{Code: 1, Status: "exit code 0, though nobody asked it to end"}
	default:
		s.infof("Shutdown complete")
		return nil
	}
}

// reportLoss waits for the end of a lease. The first loss is the one that counts.
func (s *server) reportLoss(lease *deviceapi.Lease) {
	<-lease.Done()
	if err := lease.Err(); err != nil {
		select {
		case s.lost <- fmt.Errorf("RuntimeError: CUDA error: the memory of this server on %s is lost: %w", lease.DeviceUUID(), err):
		default:
		}
	}
}

// reportReady says when the API answers, as the real server's log does.
func (s *server) reportReady(ctx context.Context) {
	scheme := "http"
	// The certificate is for clients; this is a look at the own process.
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	if s.args.SSLCertFile != "" {
		scheme = "https"
	}
	s.infof("Starting vLLM server on %s://0.0.0.0:%d", scheme, s.args.Port)

	client := &http.Client{Transport: transport, Timeout: time.Second}
	url := fmt.Sprintf("%s://127.0.0.1:%d/health", scheme, s.args.Port)
	for {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return
		}
		if response, err := client.Do(request); err == nil {
			response.Body.Close()
			if response.StatusCode == http.StatusOK {
				s.infof("Application startup complete. Ready to accept inference requests on port %d", s.args.Port)
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// release gives the memory back.
func (s *server) release() {
	if s.client == nil {
		return
	}
	if err := s.client.Close(); err != nil {
		s.warningf("Closing the connections to the devices: %v", err)
	}
}

// thousands writes 171040 as 171,040.
func thousands(n int64) string {
	digits := fmt.Sprint(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}
