"""Tenants: who may do what, how much of it, and what they have used. Policy without I/O, but for `store`.

In order: `keys` (from a key to what it may do), `prices` (what requests cost), `limits` (what one reserves
and is charged), `fairness` (whose turn it is where requests wait), `usage` (counts, and their way to the
store), `reporting` (sends them), `notices` (what a webhook is told), `store` (all of it on disk),
`organization` (as OpenAI's clients read it).
"""
