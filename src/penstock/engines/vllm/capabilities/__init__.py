"""What Penstock adds to vLLM beyond its public interface, each part only where the installed vLLM fits it.

`version` says which versions are accepted. `needs` compares names, signatures and fields in vLLM's source
with what Penstock expects, `table` lists the capabilities with their needs, and `state` decides which are on.
Without all of them vLLM's own application runs over AsyncLLM and vLLM's own core.
"""
