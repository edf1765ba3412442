"""Which replica gets a request: policies as pure functions of the table, the request and the time. No I/O.

`policy` is the contract (`RoutingRequest` in, `Pick` out) and `registry` finds a policy by name or import
path; `simple` and `prefix_affinity` are the policies; they share the indexes `prefix_index`, `prefix_hashes`,
`hash_ring`, and `load_bounds`. Before them `split` picks one of the versions of a model.
"""

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.routing.policy import Pick, Policy, RoutingRequest
from penstock.serve.routing.registry import policy

Asked = RoutingRequest  # its earlier name

__all__ = ["Asked", "Candidates", "Pick", "Policy", "RoutingRequest", "policy"]
