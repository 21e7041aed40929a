package conformance

func resourceSliceChecks() []Check { return nil }
func prepareChecks() []Check       { return nil }
func unprepareChecks() []Check     { return nil }
