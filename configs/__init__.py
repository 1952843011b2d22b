"""Which experiments come ready to run? TOML files, one each, used by name: ``trainer run --config quickstart``."""
