"""Tenants' requests in a gateway: `registry` (keys, limits and usage of this process), `tokens` (of an
identity provider, in place of keys), `meter` (of one request: what it has reserved, and what it took).
"""
