"""Which replica gets a request: policies as pure functions of the table, of the request, and of the time.

asked      what a policy is told and answers: the contract
reading    from a request's bytes to that
policies   by name; one file for each, or for two that are alike
own        a user's class, held to the contract
"""

from penstock.serve.fleet.candidates import Candidates
from penstock.serve.routing.policy import Asked, Pick, Policy
from penstock.serve.routing.registry import policy

__all__ = ["Asked", "Candidates", "Pick", "Policy", "policy"]
