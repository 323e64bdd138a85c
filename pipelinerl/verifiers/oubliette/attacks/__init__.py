"""Programs that try to break out of a sandbox, as one table in parts; `../probe.py` runs them."""
