"""The gateway: one ASGI app that decides once per request and then only moves bytes.

In the order of a request: `app`, `request`, `auth`, `routes`, `body`, `catalogue`, `stored_responses`,
`routing_features`, `dispatch`, `admission`, `relay`, `response`. Beside it `own_answers`, `admin`,
`openapi` with `page.html`, and `telemetry/`.
"""
