"""vLLM's front-end in the replica's process: its OpenAI app, and our changes to it.

`app` builds it. A request meets `direct_routes`, `request_models`, `limits`, `structured_output`,
`forced_tools`, `prepared_prompts`, `response_store`, `endpoints`; its response `timing`, `fast_stream`,
`reasoning_stream`, `transcript_text`. `stats` reads the scheduler's numbers.
"""
