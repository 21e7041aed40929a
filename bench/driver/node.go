package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	draapi "k8s.io/kubelet/pkg/apis/dra/v1"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

const (
	driverName = "gpu.nvidia.com"
	nodeName   = "node-1"
)

// node is the driver's program, as it is installed, on a node of its own.
type node struct {
	cmd   *exec.Cmd
	http  string
	conn  *grpc.ClientConn
	claim draapi.DRAPluginClient
	// ready is the time from the start of the process until it is ready.
	ready time.Duration
}

// startNode starts the driver with that many GPUs and waits until it is ready.
func startNode(ctx context.Context, program, dir, cdiDir string, api *apiServer, gpus int) (*node, error) {
	for _, d := range []string{"plugins", "registry", "tools"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	kubeconfig := fmt.Sprintf("apiVersion: v1\nkind: Config\ncurrent-context: c\nclusters: [{name: c, cluster: {server: %q}}]\ncontexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {}}]\n", api.URL)
	inventory := fmt.Sprintf("apiVersion: simgpu.dev/v1alpha1\nkind: NodeInventory\nrules:\n- name: bench\n  gpus: [{model: h100-sxm5-80gb, count: %d}]\n", gpus)
	for name, content := range map[string]string{"kubeconfig": kubeconfig, "inventory.yaml": inventory, "tools/nvidia-smi": "smi", "tools/simgpu-run": "run"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755); err != nil {
			return nil, err
		}
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	n := &node{http: "http://127.0.0.1:" + port}
	n.cmd = exec.CommandContext(ctx, program,
		"--node-name="+nodeName, "--inventory="+filepath.Join(dir, "inventory.yaml"), "--kubeconfig="+filepath.Join(dir, "kubeconfig"),
		"--kubelet-plugins-dir="+filepath.Join(dir, "plugins"), "--kubelet-registrar-dir="+filepath.Join(dir, "registry"),
		"--cdi-dir="+cdiDir, "--tools-dir="+filepath.Join(dir, "tools"), "--http-endpoint=127.0.0.1:"+port, "--force-beside-real-gpu")
	n.cmd.Env = append(os.Environ(), "POD_UID=bench")
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	n.cmd.Stdout, n.cmd.Stderr = log, log
	begin := time.Now()
	if err := n.cmd.Start(); err != nil {
		return nil, err
	}
	if err := n.register(ctx, filepath.Join(dir, "registry", driverName+"-bench-reg.sock")); err != nil {
		return nil, errors.Join(err, n.stop())
	}
	for time.Since(begin) < time.Minute {
		response, err := http.Get(n.http + "/readyz")
		if err == nil {
			response.Body.Close()
			if response.StatusCode == http.StatusOK {
				n.ready = time.Since(begin)
				return n, nil
			}
		}
		if err := pass(ctx, 5*time.Millisecond); err != nil {
			return nil, errors.Join(err, n.stop())
		}
	}
	return nil, errors.Join(fmt.Errorf("the driver is not ready after a minute; its log is %s", log.Name()), n.stop())
}

// register does what the kubelet does.
func (n *node) register(ctx context.Context, socket string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.WaitForReady(true)), grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}))
	if err != nil {
		return err
	}
	defer conn.Close()
	client := registerapi.NewRegistrationClient(conn)
	info, err := client.GetInfo(ctx, &registerapi.InfoRequest{})
	if err != nil {
		return err
	}
	if _, err := client.NotifyRegistrationStatus(ctx, &registerapi.RegistrationStatus{PluginRegistered: true}); err != nil {
		return err
	}
	if n.conn, err = grpc.NewClient("unix:"+info.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		return err
	}
	n.claim = draapi.NewDRAPluginClient(n.conn)
	return nil
}

func (n *node) stop() error {
	if n.conn != nil {
		n.conn.Close()
	}
	if err := n.cmd.Process.Signal(os.Interrupt); err != nil {
		return err
	}
	return n.cmd.Wait()
}

// requests returns how often the driver has written to the API, and how often it has asked it anything.
func (n *node) requests() (writes, all int, err error) {
	response, err := http.Get(n.http + "/metrics")
	if err != nil {
		return 0, 0, err
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		series, value, _ := strings.Cut(lines.Text(), "} ")
		if !strings.HasPrefix(series, "simgpu_api_requests_total{") {
			continue
		}
		count, err := strconv.Atoi(value)
		if err != nil {
			return 0, 0, err
		}
		all += count
		for _, verb := range []string{"create", "update", "patch", "delete"} {
			if strings.Contains(series, `verb="`+verb+`"`) {
				writes += count
			}
		}
	}
	return writes, all, lines.Err()
}

// cpu is the processor time that the driver has used.
func (n *node) cpu() (time.Duration, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.cmd.Process.Pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(data[strings.LastIndexByte(string(data), ')')+1:]))
	var ticks int
	for _, field := range fields[11:13] { // utime, stime
		t, err := strconv.Atoi(field)
		if err != nil {
			return 0, err
		}
		ticks += t
	}
	return time.Duration(ticks) * time.Second / 100, nil
}

// rss is the memory that the driver occupies, in MiB, and the most it has occupied so far.
func (n *node) rss() (now, peak float64, err error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.cmd.Process.Pid))
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "VmRSS:" && fields[0] != "VmHWM:" {
			continue
		}
		kib, err := strconv.Atoi(fields[1])
		if err != nil {
			return 0, 0, err
		}
		if fields[0] == "VmRSS:" {
			now = float64(kib) / 1024
		} else {
			peak = float64(kib) / 1024
		}
	}
	return now, peak, nil
}

func freePort() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer listener.Close()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	return port, err
}
