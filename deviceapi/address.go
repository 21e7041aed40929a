package deviceapi

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
)

// maxSocketPath is the longest path of a unix socket: sun_path of unix(7) less its
// terminating zero.
const maxSocketPath = 107

// withAddress calls do with a path by which a socket can be bound or reached: path
// itself, or where that is too long for a socket's address one through the descriptor
// of its folder, which lasts as long as do.
func withAddress(path string, do func(address string) error) error {
	if len(path) <= maxSocketPath {
		return do(path)
	}
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer folder.Close()
	return do(fmt.Sprintf("/proc/self/fd/%d/%s", folder.Fd(), filepath.Base(path)))
}

// connect reaches the socket at path.
func connect(ctx context.Context, path string) (conn net.Conn, err error) {
	err = withAddress(path, func(address string) error {
		conn, err = (&net.Dialer{}).DialContext(ctx, "unix", address)
		return err
	})
	return conn, err
}
