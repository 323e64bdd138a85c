"""RLAX Eq. 3 as five slots: pure functions on arrays of any library."""
