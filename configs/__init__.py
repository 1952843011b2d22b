"""Settings as TOML, and no code."""
