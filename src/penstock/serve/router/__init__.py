"""The gateway as Ray Serve runs it.

In order: `deployment` (binding), `router` (LLMRouter), `ingress` (the same as a class with endpoints of
your own), `traffic_shift` (which application's replicas answer for a model).
"""
