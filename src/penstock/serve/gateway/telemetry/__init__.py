"""What the gateway measures and logs: `timing` of each request, `tracing` and its `spans`, the engines' own
metrics (`engine_metrics`), and the sum over the gateway processes that share a port (`process_totals`)."""
