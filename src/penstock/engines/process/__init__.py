"""Any OpenAI-compatible HTTP server as a child process behind the Engine protocol.

`engine` takes `options`, starts the `child` under its `keeper` and waits for its `readiness`. A request
passes the `gate`, then `relay` (with `forced_tools`) or `completion`, and goes by `wire`; `gauges` reads the
child's load.
"""
