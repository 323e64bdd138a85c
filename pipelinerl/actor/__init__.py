"""The loop around engines: it claims a prompt order, has an engine sample the order's group, has the group verified,
and appends it to the stream.
"""
