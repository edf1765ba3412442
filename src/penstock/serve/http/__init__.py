"""Sockets and HTTP below the gateway and below a replica's listener.

In the order of a request: `sockets`, `server`, `listener`, `tls`, `protocol`, `connection_limits`, `limits`,
`cors`, `direct_writer` for the way back; `serve_proxy` where Ray Serve's HTTP stands in front;
`private_listener` for Penstock's own processes.
"""
