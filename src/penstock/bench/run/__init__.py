"""One run: from options to figures.

options (what the user wrote), settings (the same, checked), probe (what the service understands, before any
load), session (all levels, one after the other), figures (percentiles, rates, errors, latency targets,
goodput).
"""
