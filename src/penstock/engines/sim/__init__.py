"""The simulated engine: real HTTP, real streams, modelled time. For tests, load and capacity questions.

`engine` takes `options`. A request meets `app`, `wire` (of agents: `responses`, `messages`), `tools`,
`tokenizer`, `reply`; `scheduler`, `batch` and `cache` model time and memory; `events` writes
the answer, `metrics` the numbers.
"""
