"""What a gateway knows of replicas. It decides nothing.

In order: `membership` (Serve's list), `links` (their reports), `table` (which may take a request), `replica`
(one of them), `candidates` (what routing policies read).
"""
