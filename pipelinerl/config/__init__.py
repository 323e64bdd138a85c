"""A run's configuration, written as a TOML recipe: read once, resolved, validated, frozen."""
