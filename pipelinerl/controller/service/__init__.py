"""The controller's process-side: HTTP routes, the journal, and the loop that carries decisions out."""
