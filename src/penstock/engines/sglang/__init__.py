"""SGLang: its own HTTP server in a process of its own, behind the Engine protocol.

`engine` takes `flags` and builds on `engines.process`. A request meets `front` and `parameters`; `deltas`,
`times` and `errors` read the answers, `server` its fields and load, `metrics` its numbers.
"""
