// Package v1alpha1 is the generated code of device.proto, the wire format of
// package deviceapi. Nothing but deviceapi imports it.
package v1alpha1

//go:generate ./generate.sh
