"""The controller's state, inputs and effects: plain values that contain no decisions and do no I/O."""
