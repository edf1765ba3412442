"""Whether a model loads and fits, from its files and a table of devices: no engine, no torch, no GPU needed.

In the order of a call: `examine`, `files`, `model` (what config.json says), `sizes` (the arguments),
`weights`, `cache`, `devices`, `fit`, `loading` (what would stop a start); `start` asks
all of it of a model's config.
"""
