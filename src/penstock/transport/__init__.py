"""How gateways and batch jobs reach a replica.

In order: `address` (of its listener), `headers` (which fields pass), `connection` and `pool` (HTTP/1.1),
`multiplexer` (all streams over one connection), `rows` (a batch job's, over one connection), `link` (the
replica's reports).
"""
