"""vLLM behind the Engine protocol. This folder is the only place that knows vLLM, and it knows version 0.32.

A replica's process holds vLLM's front (tokenizer, AsyncLLM, the OpenAI application); the engine core is a
process of its own, started by us so that it imports while the front imports, and tied to us so that it never
outlives us.

    engine       the protocol's methods           edge, errors  vLLM's errors into ours
    front        AsyncLLM and the OpenAI app      stats         what the scheduler reports
    launch       the core's process, seen from the replica
    core         that process itself              plugin, reason, progress  what also runs in its workers
    sockets      its threads that take requests and give answers
    environment, defaults                         what we set where the user sets nothing
    timing                                        where a request's time went in the engine
    thoughts                                      reasoning in streams, however their tokens come
"""
