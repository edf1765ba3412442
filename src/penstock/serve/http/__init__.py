"""Sockets and HTTP below the gateway and below a replica's listener.

In the order of a request: `sockets`, `port_sharing`, `server`, `protocol` with `upgrade`, `connection_limits`
and `limits`, `direct_writer` for the way back; `serve_proxy` where Ray Serve's HTTP stands in front.
"""
