"""Reports on a step: figures by domain and tag, and a few samples."""
