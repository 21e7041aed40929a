// Package checkpoint remembers on disk which claims the node driver has prepared: one small file per
// claim, so that the cost of an operation does not grow with the number of claims and a damaged file
// harms one claim. It owns the format and the folder. It does not know what a device is or how to
// prepare one.
//
// # States
//
// A claim's file is written in state Preparing before anything else is done for the claim, and
// replaced in state Prepared after everything is done. Undoing goes the other way: back to Preparing
// first, the file removed last. So a file in state Preparing means that the kubelet was never told of
// a success, or has asked for the undoing, and that whatever exists of the claim may be removed.
//
// # Format
//
// A file holds one JSON object:
//
//	{"format": "simgpu.dev/checkpoint", "version": 1, "sum": "sha256:<hex>", "claim": {...}}
//
// The sum is over the bytes of the value of "claim" as they stand in the file, not over what a program
// makes of them. A program therefore verifies a file that holds fields it has never heard of, and a
// file whose fields it would write in another order.
//
// # Compatibility
//
// The files of one driver release are read by the next, and after a rollback by the one before.
//
//   - A field may be added within a version if a reader that ignores it, and a file that lacks it, both
//     lead to a correct prepare, rebuild and unprepare. Readers ignore unknown fields.
//   - A field is never removed, renamed or given another meaning within a version.
//   - The version goes up for anything else. A release that writes a version must be preceded by a
//     release that reads it, or a rollback cannot read what was written. A file of an unknown version
//     is treated like a damaged one: set aside, and settled from the API.
//   - Files in testdata are what releases have written. They are never edited, and every one must
//     stay readable.
//
// # Damage
//
// A file that cannot be read is renamed to <uid>.unreadable and reported together with whatever can
// still be made out of it. It counts as a claim of unknown content until it is written anew or removed. While
// it is being rebuilt there is no file in state Preparing: a crash leaves a claim of unknown content, not
// one that may be undone although containers use it.
//
// A file that cannot be read, that speaks of no device, and whose name is no UID as an API server makes
// them, is nobody's claim. It is reported and left alone.
package checkpoint
