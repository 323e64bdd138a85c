"""How the trainer's weights reach the engines, all or nothing: pushed by broadcast, or pulled from a server."""
