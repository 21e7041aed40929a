// Package node is a cluster node without a virtual machine and without Docker: a set of namespaces (mount, process,
// network, host name, IPC, control group) held by one small init process, which is process 1 of the node.
//
// The init builds the node's file system, starts the node's components in order, keeps account of them, and does what
// the machine asks for over a socket. When it ends, the kernel ends every process of the node and forgets its mounts
// and its network, so that nothing of a node can outlive it.
//
// Inside a node all paths are those of a real node: /var/lib/kubelet, /var/lib/containerd, /var/log/pods, /etc/cni,
// /etc/cdi, /run. They belong to the node: its root is a folder of its own, /run and /tmp are empty at every start, and of
// the machine's files it sees /usr (with /bin, /lib, /sbin) read-only, some of /etc, and /dev.
//
// The package knows nothing of Kubernetes: what to run, and when a component is ready, comes in as data (Spec).
package node
