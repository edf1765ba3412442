"""vLLM behind the Engine protocol. Only this folder knows vLLM, in the versions that `capabilities` names.

A replica's process holds vLLM's front-end (tokenizer, AsyncLLM, the OpenAI app). The engine core is a process
of its own: it imports while the front-end imports, and never outlives its owner.

`engine` is the adapter; `control`, `adapters`, `deltas`, `endpoints`, `errors` belong to it.
`capabilities/` decides what fits the installed version, `arguments/` checks engine arguments, `core/` is the
engine core's process, `frontend/` the OpenAI app, `continued/` goes on with streams of other engines, `rows/`
is a shorter way for rows of batches, `tokenizing/` bounds texts and orders them, and `media/` fetches
pictures, videos and sounds.
"""
