"""Control: the desired state of every model's replicas, and how they come to it.

In order: `deployment` (what is called by handle), `operations` (their arguments), `desired` and `store` (the
state, in memory and on disk), `followers` (replicas), `gateways`, `time_sharing` (models that share memory),
and `state`, the messages between them.
"""
