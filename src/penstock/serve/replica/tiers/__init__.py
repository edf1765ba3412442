"""Classes of work in one replica: online first, batch in the gaps.

In order: `layer` (each request, by its class), `share` (which batch requests run, wait, or give way),
`controller` (how many may run).
"""
