"""What Penstock adds to vLLM beyond its public interface, each part only where the installed vLLM fits it.

`version` says which versions are accepted. `source` reads names, signatures and fields from vLLM's source
without importing it, `needs` compares one of them with what Penstock expects, `table` lists the capabilities
with their needs, and `state` decides which are on. Without all of them vLLM's own application runs over
AsyncLLM and vLLM's own core.
"""
