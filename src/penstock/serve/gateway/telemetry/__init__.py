"""What the gateway measures and logs: `timing` of each request, `tracing` and its `spans`, the engines' own
metrics (`engine_metrics`), the answers of a version that nobody waits for (`shadows`), and the sum over the
gateway processes that share a port (`process_totals`)."""
