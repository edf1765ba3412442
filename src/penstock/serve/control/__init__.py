"""Control: the desired state of every model's replicas, and how they come to it.

In order: `deployment` (what is called), `operations` (their arguments), `desired` (the state, in memory and
on disk), `link` (to a follower), `followers` (replicas), `gateways` (and what Serve runs), `time_sharing`
(models that share memory), `fleet` and `canary` (versions of the fleet, and of models), `stored_fleet` (those
of the fleet that outlive the service), `webhook` (usage and budgets, for those who bill), `updates` (how
what Serve passes on is taken over in gateways, and in files and batches), and `state`, the messages between
them.
"""
