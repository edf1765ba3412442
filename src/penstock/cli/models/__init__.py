"""From options and config files to the models to serve: nothing here starts Ray or an engine.

options (what the user wrote), plan (configs made of it), engine_arguments (read by the engine's own parser),
faults (every mistake in files), precheck (before Ray starts), check (`penstock check`, with placements).
"""
