"""What the gateway says of the service.

`engine_documents` fetches what engines say of themselves, `openapi` makes one description of it, `page.html`
shows that.
"""
