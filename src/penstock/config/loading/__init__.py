"""From paths, mappings or objects to configs: `load`, `serving_args`, `yaml_source` (keeps lines).
`watched_files` notices when paths are saved.
"""
