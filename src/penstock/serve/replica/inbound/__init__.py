"""What gateways reach of a replica: the ASGI apps before its engine's.

In order: `listener` (sockets, authentication, drain, death), `status_link` (reports to gateways),
`engine_response` (one response), `rows` (a batch job's, on one connection), `custom_endpoints` (paths of the
user's own).
"""
