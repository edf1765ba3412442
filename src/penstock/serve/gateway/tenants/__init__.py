"""Tenants' requests in a gateway: `registry` (keys, limits and usage of this process), `meter` (of one
request: what it has reserved, and what it took).
"""
