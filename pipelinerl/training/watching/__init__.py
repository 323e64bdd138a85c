"""What a step tells those who watch it: figures by domain and tag, and a few of its samples."""
