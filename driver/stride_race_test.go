//go:build race

package driver

// stride is which of the file system calls are disturbed: every so many, since the race detector makes each of them
// take several times as long, and of the random tests there are fewer. Without it all are.
const stride = 5
