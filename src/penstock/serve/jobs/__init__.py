"""Files and Batches beside the gateway: the process that serves them, and how their requests reach it.

In the order of a request: forwarding, deployment.
"""
