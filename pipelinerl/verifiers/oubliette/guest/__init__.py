"""Code that runs inside a slot's guest, the only part of this project that a guest sees."""
