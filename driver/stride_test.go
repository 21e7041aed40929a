//go:build !race

package driver

// stride is which of the file system calls are disturbed: all.
const stride = 1
