"""Equality of mathematical answers: extraction, notation, quantities, structures and expressions."""
