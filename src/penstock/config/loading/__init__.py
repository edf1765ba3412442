"""From paths, mappings or objects to configs: `load`, `serving_args`, `yaml_source` (keeps lines)."""
