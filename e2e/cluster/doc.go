// Package cluster brings up real Kubernetes clusters on one machine, without Docker and without an image registry: etcd,
// API server, controller manager, scheduler, kubelet, kube-proxy, CoreDNS, containerd and runc, as many nodes as asked.
//
//	c, err := cluster.Up(ctx, cluster.Config{Dirs: dirs, Name: "test", Progress: os.Stderr})
//	defer c.Down(ctx)
//	config, err := c.RESTConfig()
//
// Every node is a set of namespaces held by one process (see internal/node). A cluster listens nowhere on the
// machine but at one port of 127.0.0.1, behind which is its API server; its network, mounts and kernel settings are its own. So many
// clusters coexist, and Down leaves nothing behind.
//
// A cluster outlives the process that made it: it is found again by its name (Open). What is known of it is in
// Dirs.State; the programs it runs are in Dirs.Cache and shared between clusters.
//
// What differs from a cluster of machines: there is one control plane, on node 1; CoreDNS is a process there, behind the
// usual kube-dns Service; nothing outside of the cluster has a route or a name, so that images come from LoadImage and
// never from a registry, and what is tried all the same fails at once; NodePorts are open to the nodes alone, from the machine
// the way in is kubectl port-forward; and all nodes report the processors and the memory of the one machine.
//
// The package needs root, Linux with control groups of version 1 or 2, the go command and, for the first cluster of a
// machine, a module proxy and a Debian mirror.
package cluster
