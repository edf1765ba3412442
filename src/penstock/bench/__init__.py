"""A load generator for any OpenAI-compatible service, and its report. `penstock bench` is its command.

run (options to a run: what the service understands, levels, figures), load (worker processes that send the
requests), report (terminal, JSON and HTML). It knows OpenAI's API only; nothing of Penstock's own service.
"""
