"""Requests that begin with tokens which another engine has made: what the core does about them.

To the scheduler such tokens are output already, as of a request that was preempted, and to the worker, too:
for penalties, `min_tokens`, bad words and what is left of `max_tokens`. A grammar accepts them before its
first mask. Importing this file imports nothing of vLLM.
"""

from __future__ import annotations

import functools
from typing import Any

from penstock.engines.vllm.continued.emitted import emitted


def take_up(*, grammars: bool) -> None:
    """Changes the classes of this process's core. grammars: whether they can be advanced."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    begin, start = Request.from_engine_core_request, EngineCore.__init__

    def from_engine_core_request(request: Any, block_hasher: Any) -> Request:
        made = begin(request, block_hasher)
        if ids := emitted(request.sampling_params):
            made.append_output_token_ids(ids)
            made.prefill_stats = None  # with it, the scheduler asserts that the cache holds but the prompt
        return made

    @functools.wraps(start)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        config = self.vllm_config  # the second runner takes new requests as it takes preempted ones
        if not config.use_v2_model_runner and config.parallel_config.distributed_executor_backend != "ray":
            from penstock.engines.vllm.continued import worker

            self.collective_rpc(worker.take_up)

    Request.from_engine_core_request = staticmethod(from_engine_core_request)  # pyright: ignore[reportAttributeAccessIssue]
    EngineCore.__init__ = init
    if grammars:
        manager: Any = StructuredOutputManager
        manager._create_grammar = _advancing(manager._create_grammar)


def _advancing(create: Any) -> Any:
    def create_grammar(self: Any, request: Any) -> Any:
        """Called on a thread. What it raises ends the request."""
        grammar = create(self, request)
        if ids := emitted(request.sampling_params):
            _advance(self, request, grammar, ids)
        return grammar

    return create_grammar


def _advance(manager: Any, request: Any, grammar: Any, ids: list[int]) -> None:
    """Token by token, as they came: where a request reasons first, its grammar begins after that."""
    from vllm.v1.request import Request

    own = request.structured_output_request
    reader = Request(
        request.request_id,
        request.prompt_token_ids,
        request.sampling_params,
        None,
        reasoning_ended=own.reasoning_ended,
        reasoning_parser_kwargs=own.reasoning_parser_kwargs,
    )
    read: Any = reader.structured_output_request
    read.grammar = grammar
    for token in ids:
        reader.append_output_token_ids(token)
        if not manager.accept_tokens(reader, [token]):
            raise ValueError("The grammar refuses the tokens that the answer has begun with.")
    own.reasoning_ended, own.reasoner = read.reasoning_ended, read.reasoner
