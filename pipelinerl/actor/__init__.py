"""The loop around engines: takes a prompt order, samples its group, has it verified, appends it to the stream."""
