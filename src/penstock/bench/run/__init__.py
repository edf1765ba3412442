"""One run: from options to figures.

settings (options, checked), probe (what the service understands, before any load), session (all levels, one
after the other), slo (latency targets), figures (percentiles, rates, errors, goodput).
"""
