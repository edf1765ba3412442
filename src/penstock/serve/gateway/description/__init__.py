"""What the gateway says of the service.

`engine_documents` fetches what engines say of themselves, `answers` adds what they leave out,
`openapi` makes one description of it, `page.html` shows that.
"""
