"""Code that runs inside a guest, the sandboxed environment in which programs run. Guests see no other of our code."""
