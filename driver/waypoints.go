package driver

import "k8s.io/apimachinery/pkg/types"

// Waypoint is a step of prepare or unprepare that is complete, on disk where it concerns the disk.
type Waypoint string

const (
	IntentWritten Waypoint = "IntentWritten"
	SocketsOpened Waypoint = "SocketsOpened"
	SpecWritten   Waypoint = "SpecWritten"
	ClaimPrepared Waypoint = "ClaimPrepared"

	UndoIntentWritten Waypoint = "UndoIntentWritten"
	SpecRemoved       Waypoint = "SpecRemoved"
	SocketsClosed     Waypoint = "SocketsClosed"
	ClaimRemoved      Waypoint = "ClaimRemoved"
)

// PrepareWaypoints and UnprepareWaypoints are in the order in which they are reached.
func PrepareWaypoints() []Waypoint {
	return []Waypoint{IntentWritten, SocketsOpened, SpecWritten, ClaimPrepared}
}

func UnprepareWaypoints() []Waypoint {
	return []Waypoint{UndoIntentWritten, SpecRemoved, SocketsClosed, ClaimRemoved}
}

// Waypoints is told where the preparation of a claim has come to. It may take its time, or not come
// back at all: the claim is then where a crash at that point would leave it.
type Waypoints interface {
	Reached(at Waypoint, claim types.UID)
}

type noWaypoints struct{}

func (noWaypoints) Reached(Waypoint, types.UID) {}
