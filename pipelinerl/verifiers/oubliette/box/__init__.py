"""What runs inside a slot's box, and is all of this project that the box shows."""
