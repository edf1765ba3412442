"""Records what a stream's app takes from the engine, and lets it take first what was recorded elsewhere.

Of an answer that is not streamed nothing is recorded: the front-end has its tokens until it is complete.

Importing this file imports vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from copy import copy
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from penstock.engines.vllm.continued import answer
from penstock.engines.vllm.continued.emitted import EMITTED
from penstock.engines.vllm.continued.rules import Rules
from penstock.request_context import ChoiceTokens, record_tokens, tokens_before, tokens_so_far

Group = Sequence[ChoiceTokens]
Add = Callable[[EngineCoreRequest], Awaitable[None]]

_AT_ONCE = 16  # groups that are replayed before other tasks run, and tokens of a group of an answer's own
_FAILED = ("abort", "error")
_CACHED = ("num_cached_tokens", "num_cache_creation_tokens")


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

    def announce(self, params: Any) -> None:
        """Call it where an app makes events before it asks the engine: this request can be continued."""
        record = record_tokens.get()
        if record is not None and answer.requests() == 0 and self._rules.allow(params):
            record(())

    async def add(
        self, params: Any, add: Callable[[], Awaitable[RequestOutputCollector]]
    ) -> RequestOutputCollector:
        """What `add`, the engine's own, returns for a request with these parameters.

        Raises: VLLMValidationError for one that was begun elsewhere and cannot be continued here.
        """
        if getattr(params, "extra_args", None):
            params.extra_args.pop(EMITTED, None)  # a client's
        record, before, probe = record_tokens.get(), tokens_before.get(), tokens_so_far.get()
        if getattr(params, "output_kind", None) == RequestOutputKind.FINAL_ONLY:
            record = None if probe is None else _unrecorded
        if record is None or answer.requests() != 1 or not self._rules.allow(params):
            if probe is not None:
                probe.report(None)
            if before and record not in (None, _unrecorded):
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
        if probe is not None and record is _unrecorded:
            probe.report(taken.so_far)
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
        self._processor, self._add, self._held, self._before = processor, add, held, before
        self._replayed = enumerate(before, 1)
        self._lagging: dict[int, tuple[Any, Any]] = {}
        """Of each choice with stop strings, its `StoppableText`, whose output lags behind its tokens, and the
        holder of its logprobs.
        """
        self._counts: dict[int, int] = {}
        """Of each choice, the tokens that are recorded, where they are counted."""
        self._starting = set[int]() if held else set(range(n))
        parent = processor.parent_requests.get(self.request_id)
        for name in parent.child_requests if parent else (self.request_id,):
            state = processor.request_states.get(name)
            if state is not None and hasattr(state.detokenizer, "released"):
                self._lagging[state.request_index] = state.detokenizer, state.logprobs_processor
        if held:
            record(())

    def passed(self, token_ids: Sequence[int]) -> None:
        """Records tokens of the one choice whose text goes past this collector."""
        if not self._held:
            self._record((ChoiceTokens(self._new(0, token_ids, None)[0]),))

    def so_far(self, after: int = 0) -> Sequence[Group]:
        """The tokens of an answer that is not complete, one choice after the other; `after` the first ones
        those of one choice.
        """
        if self._held:
            return () if after else self._before
        states = self._processor.request_states
        parent = self._processor.parent_requests.get(self.request_id)
        if parent is None:
            state: Any = states.get(self.request_id)
            return [] if state is None else self._unfinished(state, after)
        made: list[Group] = []
        if after:
            return made
        for one in filter(None, parent.output_aggregator):  # those that are complete
            ended = one.finish_reason, one.stop_reason
            made += self._groups(one.index, list(one.token_ids), one.logprobs or (), (), *ended)
        for name in parent.child_requests:
            if (state := states.get(name)) is not None:
                made += self._unfinished(state)
        return made

    def _unfinished(self, state: Any, after: int = 0) -> list[Group]:
        cached = () if after else [getattr(state, name, None) or 0 for name in _CACHED]
        ids, logprobs = state.detokenizer.output_token_ids, state.logprobs_processor.logprobs or ()
        return self._groups(state.request_index, ids[after:], logprobs[after:], cached)

    def _groups(
        self,
        choice: int,
        ids: Sequence[int],
        logprobs: Sequence[Any],
        cached: Sequence[int],
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> list[Group]:
        made: list[Group] = []
        for at in range(0, len(ids), _AT_ONCE):
            end = at + _AT_ONCE
            ended = (finish_reason, stop_reason) if end >= len(ids) else (None, None)
            first = () if at else cached
            made.append((ChoiceTokens(ids[at:end], choice, *ended, first, _written(logprobs[at:end])),))
        return made

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

    def _take(self, output: Any) -> None:
        if (
            self._held
            or self._record is _unrecorded
            or any(one.finish_reason in _FAILED for one in output.outputs)
        ):
            return
        group: list[ChoiceTokens] = []
        for one in output.outputs:
            ids, logprobs = self._new(one.index, one.token_ids, one.logprobs)
            cached: Sequence[int] = ()
            if one.index in self._starting:
                self._starting.remove(one.index)
                cached = [getattr(output, name, None) or 0 for name in _CACHED]
            ended = one.finish_reason, one.stop_reason
            group.append(ChoiceTokens(ids, one.index, *ended, cached, _written(logprobs or ())))
        self._record(group)

    def _new(self, choice: int, token_ids: Sequence[int], logprobs: Any) -> tuple[Sequence[int], Any]:
        """All of a choice's tokens since the last ones, and their logprobs.

        token_ids, logprobs: those that were given with its text.
        """
        if choice not in self._lagging:
            return token_ids, logprobs
        text, more = self._lagging[choice]
        known = text.output_token_ids
        since, self._counts[choice] = self._counts.get(choice, 0), len(known)
        return known[since:], more.logprobs and more.logprobs[since : len(known)]

    async def _replay(self) -> None:
        """Returns when there is an output, or the core has the request."""
        for number, group in self._replayed:
            self._processor.process_outputs([self._output(one) for one in group])
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if self.output is not None:
                return
        held, self._held = self._held, []
        for request in held:
            if (state := self._processor.request_states.get(request.request_id)) is not None:
                state.is_prefilling = True  # its first token from this core has the times of a first one
                assert state.detokenizer is not None
                self._counts[state.request_index] = state.detokenizer.num_output_tokens()
                await self._add(_begun(request, list(state.detokenizer.output_token_ids)))

    def _output(self, one: ChoiceTokens) -> EngineCoreOutput:
        made = EngineCoreOutput(self._held[one.choice].request_id, list(one.token_ids))
        if one.cached_tokens or one.logprobs:
            state: Any = self._processor.request_states[made.request_id]
            for name, tokens in zip(_CACHED, one.cached_tokens, strict=False):
                setattr(state, name, tokens)
            for step in one.logprobs:
                values = {id: Logprob(value, rank, text) for id, value, rank, text in step}
                state.logprobs_processor.logprobs.append(values)
                state.logprobs_processor.cumulative_logprob += step[0][1]
        by_string = one.finish_reason == "stop" and isinstance(one.stop_reason, str)
        if one.finish_reason is not None and not by_string:  # the string will be found again
            made.finish_reason = FinishReason[one.finish_reason.upper()]
            made.stop_reason = one.stop_reason
        return made


def _unrecorded(group: Group | None) -> None:
    """Of an answer that is not streamed."""


def _written(logprobs: Sequence[Any]) -> list[list[tuple[int, float, int | None, str | None]]]:
    return [[(id, x.logprob, x.rank, x.decoded_token) for id, x in step.items()] for step in logprobs]


def _begun(request: EngineCoreRequest, token_ids: list[int]) -> EngineCoreRequest:
    """The request as its core gets it, with the tokens of its output."""
    made, made.sampling_params = copy(request), copy(request.sampling_params)
    assert made.sampling_params is not None
    made.sampling_params.extra_args = {**(made.sampling_params.extra_args or {}), EMITTED: token_ids}
    return made
