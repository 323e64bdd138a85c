"""Transfer of the trainer's weights to the engines: by broadcast, or through parameter servers; all or nothing."""
