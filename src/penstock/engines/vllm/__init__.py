"""vLLM behind the Engine protocol. Only this folder knows vLLM, and it knows version 0.32.

A replica's process holds vLLM's front-end (tokenizer, AsyncLLM, the OpenAI app). The engine core is a process
of its own: it imports while the front-end imports, and never outlives its owner.

`engine` is the adapter; `control`, `adapters` and `deltas` belong to it, `version` and `errors` guard it.
`arguments/` checks engine arguments, `core/` is the engine core's process, `frontend/` the OpenAI app, and
`media/` fetches pictures, videos and sounds.
"""
