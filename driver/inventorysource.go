package driver

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"time"

	"github.com/fsnotify/fsnotify"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/simgpu/simgpu/driver/inventory"
)

const (
	// settleTime lets the several steps in which a file or ConfigMap is replaced come to an end.
	settleTime = 100 * time.Millisecond
	// inventoryPoll is for changes that the file system reports to nobody.
	inventoryPoll = 30 * time.Second
)

// inventorySource reads the inventory when it or the labels of the node change.
type inventorySource struct {
	factory
	file string
	// apply is told what the inventory has for the node, or that it has a fault.
	apply    func(gpus []stockGPU, err error)
	reporter *reporter
	metrics  *metrics

	data     []byte
	labels   map[string]string
	read     bool // data and labels have been looked at
	inForce  []inventory.GPUGroup
	hasValid bool
	fault    string // last one reported
}

// run works until the context ends. Labels come first: without them no rule can be chosen.
func (s *inventorySource) run(ctx context.Context, labels <-chan map[string]string) {
	logger := klog.FromContext(ctx)
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		logger.Error(err, "Changes of the inventory are seen late: files cannot be watched", "period", inventoryPoll)
		watcher = &fsnotify.Watcher{}
	} else {
		defer watcher.Close()
	}
	// The folder, because a ConfigMap is replaced by moving a symbolic link in it.
	folder := filepath.Dir(s.file)
	watching := false

	var current map[string]string
	var settled <-chan time.Time
	poll := time.NewTicker(inventoryPoll)
	defer poll.Stop()
	for {
		if !watching && err == nil {
			watching = watcher.Add(folder) == nil
		}
		select {
		case <-ctx.Done():
			return
		case current = <-labels:
			s.look(ctx, current)
		case _, open := <-watcher.Events:
			if open && settled == nil {
				settled = time.After(settleTime)
			}
		case watchErr := <-watcher.Errors:
			logger.V(2).Info("Watching the inventory failed", "err", watchErr)
		case <-settled:
			settled = nil
			if current != nil {
				s.look(ctx, current)
			}
		case <-poll.C:
			if current != nil {
				s.look(ctx, current)
			}
		}
	}
}

// look reads the file and applies it if it, or what counts of the labels, has changed.
func (s *inventorySource) look(ctx context.Context, labels map[string]string) {
	data, err := os.ReadFile(s.file)
	if err != nil {
		s.read = false // the same content may come back
		s.refuse(ctx, err)
		return
	}
	if s.read && bytes.Equal(data, s.data) && maps.Equal(labels, s.labels) {
		return
	}
	s.data, s.labels, s.read = data, labels, true

	groups, gpus, err := s.evaluate(data, labels)
	if err != nil {
		s.refuse(ctx, fmt.Errorf("%s: %w", s.file, err))
		return
	}
	s.metrics.inventoryValid.Set(1)
	recovered := s.fault != ""
	s.fault = ""
	if s.hasValid && !recovered && reflect.DeepEqual(groups, s.inForce) {
		return
	}
	logger := klog.FromContext(ctx)
	if s.hasValid || recovered {
		s.reporter.node(corev1.EventTypeNormal, reasonInventoryApplied, "The inventory %s is in force: %d GPUs", s.file, len(gpus))
	}
	logger.Info("Inventory in force", "file", s.file, "gpus", len(gpus))
	for _, absent := range absentOf(gpus) {
		logger.Info("Some partitions are not offered: nobody sourced their figures", "absent", absent)
	}
	s.inForce, s.hasValid = groups, true
	s.apply(gpus, nil)
}

func (s *inventorySource) evaluate(data []byte, labels map[string]string) ([]inventory.GPUGroup, []stockGPU, error) {
	all, err := inventory.DecodeWith(s.catalogue, data)
	if err != nil {
		return nil, nil, err
	}
	groups, err := all.ForNode(s.nodeName, labels)
	if err != nil {
		return nil, nil, err
	}
	gpus, err := s.fromInventory(groups)
	return groups, gpus, err
}

// refuse reports a fault once and changes nothing.
func (s *inventorySource) refuse(ctx context.Context, err error) {
	s.metrics.inventoryValid.Set(0)
	if s.fault == err.Error() {
		return
	}
	s.fault = err.Error()
	consequence := "Nothing is published until it is corrected"
	if s.hasValid {
		consequence = "The previous one stays in force"
	}
	klog.FromContext(ctx).Error(err, "Inventory refused", "consequence", consequence)
	s.reporter.node(corev1.EventTypeWarning, reasonInvalidInventory, "Inventory refused: %v. %s", err, consequence)
	s.apply(nil, err)
}
