"""Streams that another engine can go on with, or has begun.

What vLLM's app makes of a stream depends only on the groups of tokens that it takes. Each is recorded as it
is taken. A continued request takes the recorded groups first, through vLLM's own output processing; then the
core gets the request with their tokens. So detokenizer, stop strings, parsers and usage come to the state in
which they were.

`rules` says which requests can be continued, `answer` makes the ids in an answer the same ones, `journal`
records and replays in the front-end. `emitted` is how the tokens reach `core` and its `worker`.
"""
