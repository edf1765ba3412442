"""Plain requests of batch rows, answered without vLLM's HTTP application.

`plain` says which requests are, `responder` on which engines; it has them rendered (`bulk`, `prompts`), runs
them, and makes the text of an output from all its tokens and the JSON of vLLM's own response
(`body`).
"""
