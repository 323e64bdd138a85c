"""A run for other tools: a trace for Perfetto, event files for TensorBoard."""
