"""The controller's decisions: functions and classes that map its state and an input to effects, without I/O."""
