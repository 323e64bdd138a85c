"""The controller's process: HTTP routes, the journal, and the service that carries out decisions."""
