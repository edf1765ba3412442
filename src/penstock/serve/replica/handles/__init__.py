"""Calls by handle: `api` sends them through the app that HTTP requests take.

`models` are their requests and responses; `multipart` encodes uploads. `client` sends them as a gateway does.
"""
