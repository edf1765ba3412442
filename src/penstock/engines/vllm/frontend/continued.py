"""Streams that another engine can go on with, or has begun: their tokens, recorded and replayed.

What vLLM's app makes of a stream depends only on the groups of tokens that it takes. Each is recorded as it
is taken. A continued request takes the recorded groups first, through vLLM's own output processing; then the
core gets the request with their tokens. So detokenizer, stop strings, parsers and usage come to the state in
which they were. Importing this file imports vLLM.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from copy import copy
from types import SimpleNamespace
from typing import Any

from vllm import utils
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from penstock.engines.vllm.capabilities.state import Capabilities
from penstock.engines.vllm.core.continued import EMITTED
from penstock.request_context import ChoiceTokens, created, id_seed, record_tokens, tokens_before

Group = Sequence[ChoiceTokens]
Add = Callable[[EngineCoreRequest], Awaitable[None]]

_AT_ONCE = 16  # groups that are replayed before other tasks run
_FAILED = ("abort", "error")
_CACHED = ("num_cached_tokens", "num_cache_creation_tokens")

_random = utils.random_uuid


class Answer:
    """What one HTTP request has asked of the engine. ids: numbers of the ids in its answer."""

    def __init__(self) -> None:
        self.requests = 0
        self.ids = itertools.count()


_answer: ContextVar[Answer | None] = ContextVar("_answer", default=None)


def begin() -> None:
    """Call it in the context that all tasks of an HTTP request inherit."""
    if record_tokens.get() is not None or tokens_before.get():
        _answer.set(Answer())


def count() -> None:
    """Call it for each request to the engine: of several, none can be continued."""
    if (answer := _answer.get()) is None:
        begin()
        answer = _answer.get()
    if answer is not None:
        answer.requests += 1


def refuse() -> None:
    """Call it before an answer whose tokens do not tell what its app makes of them."""
    if (answer := _answer.get()) is not None:
        answer.requests += 1


class Rules:
    """Which requests can be continued exactly, here and in engines with the same configuration."""

    def __init__(self, config: Any, capabilities: Capabilities) -> None:
        parallel, model = config.parallel_config, config.model_config
        self._v2: bool = config.use_v2_model_runner
        self._any = capabilities.has("continued_streams") and not (
            config.speculative_config
            or config.kv_transfer_config
            or getattr(config, "ec_transfer_config", None)
            or getattr(config, "watermark_config", None)
            or getattr(config, "aux_output_config", model).enable_return_routed_experts
            or getattr(model, "is_diffusion", False)
            or model.is_encoder_decoder
            or model.logits_processors
            or parallel.pipeline_parallel_size > 1
            or (parallel.distributed_executor_backend == "ray" and not self._v2)
        )
        self._grammars = capabilities.has("continued_grammars")
        self._seeds = self._v2 or (capabilities.has("continued_seeds") and _draws_are_known(model))

    def allow(self, params: Any) -> bool:
        return (
            self._any
            and isinstance(params, SamplingParams)
            and params.output_kind == RequestOutputKind.DELTA
            and params.num_logprobs is None
            and params.prompt_logprobs is None
            and getattr(params, "prompt_logprob_token_ids", None) is None
            and getattr(params, "thinking_token_budget", None) is None
            and getattr(params, "trace_decode_token_ids", None) is None
            and (params.structured_outputs is None or self._grammars)
            and (params.seed is None or not params.temperature or self._seeds)
        )


def _draws_are_known(model: Any) -> bool:
    """Whether the first runner draws for a seeded request as `continued_worker` does."""
    from vllm.platforms import CpuArchEnum, current_platform

    if current_platform.is_cuda():
        return True
    usual = current_platform.get_cpu_architecture() in (CpuArchEnum.X86, CpuArchEnum.ARM)
    return current_platform.is_cpu() and usual and not getattr(model, "use_fp64_gumbel", False)


class Continued:
    """Of one engine: records its requests, and holds back from its core those that begin with a replay."""

    def __init__(self, rules: Rules, processor: OutputProcessor, core: Any) -> None:
        """core: vLLM's client of it, whose `add_request_async` is replaced."""
        self._rules, self._processor = rules, processor
        self._held: ContextVar[list[EngineCoreRequest] | None] = ContextVar("_held", default=None)
        self._add: Add = core.add_request_async
        core.add_request_async = self._hold

    async def _hold(self, request: EngineCoreRequest) -> None:
        held = self._held.get()
        if held is None:
            await self._add(request)
        else:
            held.append(request)

    async def add(
        self, params: Any, add: Callable[[], Awaitable[RequestOutputCollector]]
    ) -> RequestOutputCollector:
        """What `add`, the engine's own, returns for a request with these parameters.

        Raises: VLLMValidationError for one that was begun elsewhere and cannot be continued here.
        """
        if getattr(params, "extra_args", None):
            params.extra_args.pop(EMITTED, None)  # a client's
        answer, record, before = _answer.get(), record_tokens.get(), tokens_before.get()
        if answer is None or record is None:
            return await add()
        if answer.requests > 1 or not self._rules.allow(params):
            if before:
                raise VLLMValidationError("This engine cannot go on with an answer to such a request.")
            return await add()
        held: list[EngineCoreRequest] = []
        token = self._held.set(held if before else None)
        try:
            taken: Any = await add()
        finally:
            self._held.reset(token)
        taken.__class__ = Journal
        taken.open(record, params.n, self._processor, self._add, held, before)
        return taken


class Journal(RequestOutputCollector):
    """Of a request that can be continued: all that its app takes passes here."""

    def open(
        self,
        record: Callable[[Group], None],
        n: int,
        processor: OutputProcessor,
        add: Add,
        held: list[EngineCoreRequest],
        before: Sequence[Group],
    ) -> None:
        self._record = record
        self._processor, self._add, self._held, self._before = processor, add, held, iter(before)
        self._texts: dict[int, Any] = {}
        """Of each choice that has one, its `StoppableText`, whose output lags behind its tokens."""
        self._counts: dict[int, int] = {}
        """Of each choice, the tokens that are recorded, where they are counted."""
        self._starting = set[int]() if held else set(range(n))
        parent = processor.parent_requests.get(self.request_id)
        for name in parent.child_requests if parent else (self.request_id,):
            state = processor.request_states.get(name)
            if state is not None and hasattr(state.detokenizer, "released"):
                self._texts[state.request_index] = state.detokenizer
        if held:
            record(())

    def passed(self, token_ids: Sequence[int]) -> None:
        """Records tokens of the one choice whose text goes past this collector."""
        if not self._held:
            self._record((ChoiceTokens(self._new(0, token_ids)),))

    def get_nowait(self) -> Any:
        output = super().get_nowait()
        if output is not None:
            self._take(output)
        return output

    async def get(self) -> Any:
        if self._held and self.output is None:
            await self._replay()
        output = await super().get()
        self._take(output)
        return output

    def _take(self, output: RequestOutput) -> None:
        if self._held or any(one.finish_reason in _FAILED for one in output.outputs):
            return
        group: list[ChoiceTokens] = []
        for one in output.outputs:
            ids, cached = self._new(one.index, one.token_ids), ()
            if one.index in self._starting:
                self._starting.remove(one.index)
                cached = [getattr(output, name, None) or 0 for name in _CACHED]
            group.append(ChoiceTokens(ids, one.index, one.finish_reason, one.stop_reason, cached))
        self._record(group)

    def _new(self, choice: int, token_ids: Sequence[int]) -> Sequence[int]:
        """All of a choice's tokens since the last ones. token_ids: those that were given with its text."""
        if (text := self._texts.get(choice)) is None:
            return token_ids
        known = text.output_token_ids
        since, self._counts[choice] = self._counts.get(choice, 0), len(known)
        return known[since:]

    async def _replay(self) -> None:
        """Returns when there is an output, or the core has the request."""
        for number, group in enumerate(self._before, 1):
            self._processor.process_outputs([self._output(one) for one in group])
            if self.output is not None:
                return
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        held, self._held = self._held, []
        for request in held:
            if (state := self._processor.request_states.get(request.request_id)) is not None:
                state.is_prefilling = True  # its first token from this core has the times of a first one
                assert state.detokenizer is not None
                self._counts[state.request_index] = state.detokenizer.num_output_tokens()
                await self._add(_begun(request, list(state.detokenizer.output_token_ids)))

    def _output(self, one: ChoiceTokens) -> EngineCoreOutput:
        made = EngineCoreOutput(self._held[one.choice].request_id, list(one.token_ids))
        if one.cached_tokens:
            state = self._processor.request_states[made.request_id]
            for name, tokens in zip(_CACHED, one.cached_tokens, strict=True):
                setattr(state, name, tokens)
        by_string = one.finish_reason == "stop" and isinstance(one.stop_reason, str)
        if one.finish_reason is not None and not by_string:  # the string will be found again
            made.finish_reason = FinishReason[one.finish_reason.upper()]
            made.stop_reason = one.stop_reason
        return made


def _begun(request: EngineCoreRequest, token_ids: list[int]) -> EngineCoreRequest:
    """The request as its core gets it, with the tokens of its output."""
    made, made.sampling_params = copy(request), copy(request.sampling_params)
    assert made.sampling_params is not None
    made.sampling_params.extra_args = {**(made.sampling_params.extra_args or {}), EMITTED: token_ids}
    return made


def name_by_seed() -> None:
    """Makes the ids and times in vLLM's answers the same in an answer that is continued.

    Call it when the model's parsers are imported.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(_NAMING) and vars(module).get("random_uuid") is _random:
            vars(module)["random_uuid"] = unique
        if name.startswith(_ANSWERING) and vars(module).get("time") is time:
            vars(module)["time"] = SimpleNamespace(time=lambda: created.get() or time.time())
        if name == _MESSAGES and vars(module).get("uuid") is uuid:
            vars(module)["uuid"] = SimpleNamespace(uuid4=lambda: uuid.UUID(unique() + unique()))
        if name == _MISTRAL:
            module.MistralToolCall.generate_random_id = staticmethod(lambda: unique()[:9])


_NAMING = ("vllm.entrypoints.", "vllm.parser.", "vllm.renderers.", "vllm.tool_parsers.")
_ANSWERING = ("vllm.entrypoints.openai.chat_completion.serving", "vllm.entrypoints.openai.completion.serving")
_ANSWERING += ("vllm.entrypoints.openai.responses.serving",)
_MESSAGES, _MISTRAL = "vllm.entrypoints.anthropic.serving", "vllm.parser.mistral"


def unique() -> str:
    """16 random hexadecimal digits, the same ones in an answer that is continued."""
    answer, seed = _answer.get(), id_seed.get()
    if answer is None or not seed:
        return _random()
    return hashlib.sha256(f"{seed} {next(answer.ids)}".encode()).hexdigest()[:16]
