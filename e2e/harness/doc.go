// Package harness gives tests a real cluster: the images and the chart as a user gets them, on the embedded local
// cluster of package cluster. It owns how such a cluster comes and goes, and the few things that many tests do in one.
//
// A package of tests has one cluster, made in its TestMain with the gates, nodes and chart values that its tests need:
//
//	var suite *harness.Suite
//
//	func TestMain(m *testing.M) { harness.Main(m, &suite, harness.Config{Name: "e2e"}) }
//
// The tests of a package run one after the other, each in a namespace of its own that is gone, with everything it held,
// before the next one starts. Packages run side by side, each with a cluster of its own.
//
// Every such package takes the flags -cluster NAME and -retain (or RETAIN in the environment), which leaves the cluster
// up at the end and starts with the one that is there.
package harness
