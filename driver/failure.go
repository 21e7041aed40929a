package driver

import (
	"context"
	"errors"
	"io/fs"
	"net/url"
	"os"
	"syscall"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// failureReason says why a prepare or unprepare failed, as the value of a label: few, and always the same.
type failureReason string

const (
	failedConflict  failureReason = "conflict"  // another claim has the device
	failedNotFound  failureReason = "not_found" // the node does not have the device, or no valid inventory
	failedConfig    failureReason = "config"    // the parameters in the claim or its class
	failedUnsettled failureReason = "unsettled" // an unreadable checkpoint may hold the device
	failedIO        failureReason = "io"        // files and sockets of the node
	failedAPI       failureReason = "api"       // the API server
	failedFault     failureReason = "fault"     // injected
	failedTimeout   failureReason = "timeout"   // waited too long: another operation, the inventory
	failedStopping  failureReason = "stopping"  // the driver was about to end
	failedOther     failureReason = "other"
)

// failureReasons are all there are.
var failureReasons = []failureReason{
	failedConflict, failedNotFound, failedConfig, failedUnsettled, failedIO,
	failedAPI, failedFault, failedTimeout, failedStopping, failedOther,
}

// failure is an error whose reason its own type does not tell.
type failure struct {
	reason failureReason
	error
}

func (f *failure) Unwrap() error { return f.error }

// because gives an error a reason; nil stays nil.
func because(reason failureReason, err error) error {
	if err == nil {
		return nil
	}
	return &failure{reason, err}
}

// reasonOf finds the reason in the types of an error. Of several the first counts that is named here.
func reasonOf(err error) failureReason {
	var (
		told     *failure
		conflict *conflictError
		status   apierrors.APIStatus
		request  *url.Error
		path     *fs.PathError
		link     *os.LinkError
		call     *os.SyscallError
		errno    syscall.Errno
	)
	switch {
	case errors.As(err, &told):
		return told.reason
	case errors.As(err, &conflict):
		return failedConflict
	case errors.Is(err, errStopping):
		return failedStopping
	case errors.As(err, &status), errors.As(err, &request):
		return failedAPI
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return failedTimeout
	case errors.As(err, &path), errors.As(err, &link), errors.As(err, &call), errors.As(err, &errno):
		return failedIO
	}
	return failedOther
}
