"""vLLM's front-end in the replica's process: its OpenAI app, and our changes to it.

`app` builds it, with the `additions` whose capabilities are on. A request meets `direct_routes`,
`request_models`, `limits`, `structured_output`, `forced_tools`, `prepared_prompts`, `response_store`, and
enters vLLM by `gated_llm`; its response meets `token_text`, `fast_stream`, `transcript_text`. `stats` hears
the scheduler's numbers and `load` reads them.
"""
