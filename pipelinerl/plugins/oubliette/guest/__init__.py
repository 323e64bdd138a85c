"""Code that runs inside a guest, the sandbox in which programs run. Guests see no other code of this project."""
