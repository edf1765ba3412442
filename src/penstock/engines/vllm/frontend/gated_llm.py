"""AsyncLLM, by which every request enters vLLM: a gate for them, their classes of work, streams that go on.

And a request's timings, at no cost per token: vLLM keeps one record of them and updates it as the request
runs; here it is looked up once, when the request is added. Importing this file imports vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.async_llm import AsyncLLM

from penstock.engine_control import DEFAULT_WEIGHTS
from penstock.engines.vllm.continued import answer
from penstock.engines.vllm.frontend import limits
from penstock.request_context import (
    EngineTimings,
    prepared_prompt,
    report_timings,
    start_tag,
    tier,
    tokens_so_far,
)
from penstock.tiers import ENGINE_PRIORITY

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState
    from vllm.v1.metrics.stats import RequestStateStats

    from penstock.engines.vllm.continued.journal import Continued

request_state: ContextVar[RequestState | None] = ContextVar("request_state", default=None)
"""Of the request that the running task added to the engine last, if it has one output."""


class GatedLLM(AsyncLLM):
    """AsyncLLM, which calls `add_request` for every request, generating or pooling."""

    def __init__(self, *args: Any, timed: bool = True, **kwargs: Any) -> None:
        """timed: whether the core's timestamps of a request can be found."""
        super().__init__(*args, **kwargs)
        self._timed = timed
        self._by_class: bool = self.vllm_config.scheduler_config.policy == "priority"
        self.gate = asyncio.Event()
        """Set while requests may go to the core."""
        self.gate.set()
        self.weights = DEFAULT_WEIGHTS
        """Their version."""
        self.sleep_lock = asyncio.Lock()
        """Held by each operation that sleep must not overtake."""
        self.entering = 0
        """Requests that have passed the gate and are not counted as unfinished yet."""
        self.held = 0
        """Requests at the gate."""
        self.cut: Callable[[AsyncGenerator[Any, None], Any], AsyncGenerator[Any, None]] | None = None
        """Changes a request's outputs; given with its sampling parameters."""
        self.continued: Continued | None = None
        """Where streams can go on that another engine has begun."""

    async def add_request(self, *args: Any, **kwargs: Any) -> RequestOutputCollector:
        _refuse_unprepared()
        params = kwargs["params"] if "params" in kwargs else args[2]
        limits.check_words(params)
        self.held += 1
        try:
            await self.gate.wait()
        finally:
            self.held -= 1
        if (probe := tokens_so_far.get()) is not None:
            probe.compare(self.weights)  # they may have changed while it waited
        priority = ENGINE_PRIORITY[tier.get()] + start_tag.get()
        kwargs["priority"] = priority if self._by_class else 0  # whatever the client wrote
        self.entering += 1
        try:
            add = partial(super().add_request, *args, **kwargs)
            taken = await (self.continued.add(params, add) if self.continued is not None else add())
        except (OverflowError, UnicodeEncodeError) as error:
            raise VLLMValidationError(f"The request cannot be sent to the engine: {error}.") from error
        except ValueError as error:  # vLLM 0.32 checks some parameters so, and would answer 500
            raise VLLMValidationError(str(error)) from error
        finally:
            self.entering -= 1
        request_state.set(self.output_processor.request_states.get(taken.request_id))
        stats = self._stats(taken.request_id) if self._timed else None
        if stats is not None:
            report_timings(lambda: spent(stats))
        return taken

    def generate(
        self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """As vLLM's. Raises, besides: VLLMValidationError if the core cannot compile the request's form."""
        answer.count()
        outputs = super().generate(prompt, sampling_params, *args, **kwargs)
        if self.cut is not None:
            outputs = self.cut(outputs, sampling_params)
        if sampling_params.structured_outputs is None or _may_fail(self.vllm_config, prompt):
            return outputs
        return _compiled(outputs)

    async def _add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        """The base registers a request before encoding it: one that cannot be sent would stay for ever."""
        try:
            limits.check_sizes(request.sampling_params)
            await super()._add_request(request, *args, **kwargs)
        except BaseException:
            await self.abort(request.request_id, internal=True)
            raise

    def _stats(self, request_id: str) -> RequestStateStats | None:
        """None when statistics are off. For a request with several outputs, the first one's."""
        processor = self.output_processor
        parent = processor.parent_requests.get(request_id)
        child_id = min(parent.child_requests, default=request_id) if parent else request_id
        state = processor.request_states.get(child_id)
        return state.stats if state else None


def _may_fail(config: Any, prompt: Any) -> bool:
    """Whether the core may end the request for other reasons than its form: media, or a KV cache to fetch."""
    text = isinstance(prompt, dict) and cast("dict[str, Any]", prompt).get("type") == "token"
    return not text or bool(config.kv_transfer_config or config.ec_transfer_config)


async def _compiled(outputs: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """Outputs of a structured request, which the core ends before the first token if it cannot compile it."""
    begun = False
    async with aclosing(outputs):
        async for output in outputs:
            ended = any(one.finish_reason == "error" and not one.token_ids for one in output.outputs)
            if ended and not begun:
                raise VLLMValidationError(
                    "The schema, regex, grammar or structural tag cannot be used: it does not compile."
                )
            begun = True
            yield output


def _refuse_unprepared() -> None:
    """Raises: NotImplementedError where this model's prompts are made without the renderer."""
    ours = prepared_prompt.get()
    if ours is not None and not ours.taken:
        raise NotImplementedError(
            "The engine makes the prompts of this model itself, and takes no prepared ones."
        )


def spent(stats: RequestStateStats) -> EngineTimings:
    """Turns the core's timestamps, which are 0 for what has not happened, into durations."""
    times = stats.scheduled_ts or None, stats.first_token_ts or None, stats.last_token_ts
    return EngineTimings.between(stats.queued_ts, *times)
