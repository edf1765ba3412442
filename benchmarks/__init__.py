"""Measurements beside the peers: `python -m benchmarks.online`, `python -m benchmarks.failures`.

The only place where Ray's LLM packages run: each contestant has processes of its own. benchmarks/log.md says
what is measured, how it is kept fair, and what came out.
"""
