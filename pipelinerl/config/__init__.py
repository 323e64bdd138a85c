"""A run as a TOML recipe: read once, resolved, validated, frozen."""
