// Package image makes container images from static executables, without Docker and without a shell in them: one layer,
// the files that are named, nothing else. The same input gives the same bytes.
//
// Spec says what an image has; Recipe says where that comes from in this repository, and Builder keeps the results.
package image
