"""The loop around engines: it claims a prompt order, samples its group, has it verified, and appends it to the
stream.
"""
