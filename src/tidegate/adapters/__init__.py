"""Implementations of the ports. Foreign exceptions stop here. May import: `ports`, `log`, `errors`, `limits`."""
