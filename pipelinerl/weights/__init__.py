"""Transfer of a trainer's weights to engines, by broadcast or through parameter servers.

An engine serves a new version only after all of its bytes have arrived and been verified; else it keeps the old one.
"""
