"""What a run would do on given hardware: a discrete-event model of its engines, trainer, updates and pacing. Pure."""
