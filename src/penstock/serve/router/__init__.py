"""The gateway as Ray Serve runs it.

In order: `deployment` (binding), `router` (LLMRouter), `traffic_shift` (which application's replicas answer
for a model).
"""
