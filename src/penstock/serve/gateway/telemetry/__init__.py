"""What the gateway measures and logs: `timing` of each request, `tracing` and its `spans`, the engines' own
metrics (`engine_metrics`)."""
