package deviceapi

import (
	"net"
	"sync"
)

// listener bounds the connections of a socket and can cut all of them off. The
// latter matters because a gRPC server waits for clients that have connected and
// say nothing, and no client may make the driver wait.
type listener struct {
	net.Listener
	slots chan struct{} // one per connection
	cut   chan struct{} // closed by cutOff

	mu    sync.Mutex
	conns map[*boundConn]struct{} // nil after cutOff
}

func newListener(inner net.Listener) *listener {
	return &listener{
		Listener: inner,
		slots:    make(chan struct{}, maxConnections),
		cut:      make(chan struct{}),
		conns:    map[*boundConn]struct{}{},
	}
}

// Accept waits for a free slot, then for a connection.
func (l *listener) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.cut:
		return nil, net.ErrClosed
	}
	conn, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	bound := &boundConn{Conn: conn, listener: l}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns == nil {
		<-l.slots
		conn.Close()
		return nil, net.ErrClosed
	}
	l.conns[bound] = struct{}{}
	return bound, nil
}

// cutOff closes the socket and every connection.
func (l *listener) cutOff() {
	l.mu.Lock()
	conns := l.conns
	l.conns = nil
	l.mu.Unlock()
	if conns == nil {
		return
	}
	close(l.cut)
	l.Close()
	for conn := range conns {
		conn.Conn.Close()
	}
}

// boundConn gives its slot back when it is closed.
type boundConn struct {
	net.Conn
	listener *listener
	once     sync.Once
}

func (c *boundConn) Close() error {
	c.once.Do(func() {
		c.listener.mu.Lock()
		delete(c.listener.conns, c)
		c.listener.mu.Unlock()
		<-c.listener.slots
	})
	return c.Conn.Close()
}
