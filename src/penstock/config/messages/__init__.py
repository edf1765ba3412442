"""Errors of a config as sentences: `problems`, with `location`, `type_names`, `redact`."""
