"""Transfer of a trainer's weights to engines: by broadcast, or through parameter servers; all bytes arrive or none."""
