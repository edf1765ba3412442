"""SGLang: its own HTTP server in a process of its own, behind the Engine protocol.

`engine` takes `flags`, checks the `version` and builds on `engines.process`. A request meets `front` and
`parameters`; `deltas`, `times` and `errors` read its responses; `server` reads SGLang's request fields and
load, `metrics` its numbers.
"""
