// Package replay finds out what an order of devices is worth: it lets a stream of claims come and go on
// one node, has kube-scheduler's own allocator place each of them on the slices that the driver would
// publish, and counts how many got a device.
//
// # Streams
//
// Claims arrive at random, independently of each other (Poisson), ask for one partition or GPU each as a
// mix says, and stay for a time that is exponentially distributed with the mean 1. A claim that does not
// fit when it arrives is gone. The load is what they would keep busy if all fitted, as a share of the
// compute slices of the node. All orders get the same streams, so that differences between orders are
// far more certain than each order's own figures.
//
// # Orders
//
// Vendor, packed and adaptive are those of package order. The adaptive order is published as the driver
// does: it hears of a claim a while after the scheduler has placed it, and it changes one slice at a
// time, not more often than at an interval. NVIDIA is the order in which NVIDIA's own driver places
// partitions, as far as it is known.
//
// # Optimum
//
// On small cases two bounds are computed by trying everything. Repacking accepts a claim whenever all
// that is held and the claim could be placed anew, as if running work moved for free; it refuses nothing
// that fits. Offline knows the whole stream, and chooses which claims to refuse and where to place the
// others, once, so that the number of claims, or the compute they get, is the largest possible. No order
// can accept more than Offline does.
//
// The package checks that nothing the allocator gives out overlaps, whatever the order and however old.
package replay
