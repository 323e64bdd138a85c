"""Transfer of the trainer's weights to the engines, all or nothing: broadcast to them, or pulled from a server."""
