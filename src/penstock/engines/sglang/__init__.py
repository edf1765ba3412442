"""SGLang: its own HTTP server in a process of its own, behind the Engine protocol.

`engine` takes `flags` and builds on `engines.process`. A request meets `front` and `parameters`; `server`
reads SGLang's version, request fields, load, errors and metrics.
"""
