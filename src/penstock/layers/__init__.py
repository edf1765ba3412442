"""ASGI layers before an engine's HTTP application, in a replica and in batch alike.

A request passes adapters first, then prefill by other replicas, then the user's postprocessor and
preprocessor, then `/v1/generate`, and last the shorter way for plain requests of batch. They know no server
and no fleet.
"""
