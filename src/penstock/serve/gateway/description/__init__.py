"""What the gateway says of the service.

`answers` adds what engines leave out of their own descriptions, `openapi` makes one description of all,
`page.html` shows that.
"""
