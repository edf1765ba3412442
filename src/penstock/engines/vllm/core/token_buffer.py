"""An engine core that sends the tokens of non-streaming requests in groups of 16, or of more on demand.

Sent one by one, each token of such a request costs the front-end as much as a streamed one: a message, its
decoding, an update of the statistics. Here they are buffered in the core. Importing this file imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, PauseMode
from vllm.v1.engine.core import DPEngineCoreProc
from vllm.v1.request import Request

from penstock.engines.vllm.core.sockets import AttentiveCore

_PIECE = 16
"""Tokens, unless a request's `stream_interval` is larger. Cuts the cost per token to a sixteenth; token
counters lag by up to this much per request.
"""

_FRONT = 0
"""vLLM's index of the front-end; our cores have only one."""

Outputs = dict[int, EngineCoreOutputs]


@dataclass(slots=True)
class _Held:
    """piece: so many tokens are sent together."""

    piece: int
    tokens: list[int] = field(default_factory=list[int])


class TokenBuffer:
    """Token ids of open requests that were not sent to the front-end yet."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def open(self, request: Request) -> None:
        """Starts to buffer the request's tokens, if they may wait."""
        if _may_wait(request):
            asked = request.sampling_params.stream_interval if request.sampling_params else None
            self._held[request.request_id] = _Held(max(_PIECE, asked or 0))

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forgets aborted requests."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def passing(self, outputs: Iterable[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """The outputs of a step to send now, with all tokens buffered before them."""
        return [output for output in outputs if self._passes(output)]

    def _passes(self, output: EngineCoreOutput) -> bool:
        held = self._held.get(output.request_id)
        if held is None:
            return True
        held.tokens += output.new_token_ids
        if len(held.tokens) < held.piece and _is_plain(output):
            return False
        output.new_token_ids, held.tokens = held.tokens, []
        if output.finished:
            del self._held[output.request_id]
        return True

    def rest(self) -> list[EngineCoreOutput]:
        """Takes out everything buffered."""
        held = [(request_id, held) for request_id, held in self._held.items() if held.tokens]
        outputs = [EngineCoreOutput(request_id, one.tokens) for request_id, one in held]
        for _, one in held:
            one.tokens = []
        return outputs


class BufferingCore(AttentiveCore):
    """An engine core that sends fewer outputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._buffer = TokenBuffer()
        super().__init__(*args, **kwargs)

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        super().add_request(request, request_wave)
        if not request.is_finished():  # it may be there only to be aborted
            self._buffer.open(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._buffer.drop(request_ids)
        super().abort_requests(request_ids)

    def step(self) -> tuple[Outputs, bool]:
        outputs, executed = super().step()
        return self._fewer(outputs), executed

    def step_with_batch_queue(self) -> tuple[Outputs | None, bool]:
        outputs, executed = super().step_with_batch_queue()
        return outputs and self._fewer(outputs), executed

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[Any] | None:
        """Flushes the buffer first: requests aborted here keep all their tokens, and these carry the version
        of the weights that made them.
        """
        if rest := self._buffer.rest():
            self.output_queue.put_nowait((_FRONT, self._message(rest)))
        if mode == "abort":  # aborts all requests
            self._buffer = TokenBuffer()
        return super().pause_scheduler(mode, clear_cache)

    def _message(self, rest: list[EngineCoreOutput]) -> EngineCoreOutputs:
        if "weight_version" not in EngineCoreOutputs.__struct_fields__:  # before vLLM 0.32
            return EngineCoreOutputs(outputs=rest)
        return EngineCoreOutputs(outputs=rest, weight_version=self.get_weight_version())

    def _fewer(self, outputs: Outputs) -> Outputs:
        for message in outputs.values():
            message.outputs = self._buffer.passing(message.outputs)
        return outputs


class BufferingGangCore(BufferingCore, DPEngineCoreProc):
    """The same for a core of a gang, which steps with the others. The order of the bases matters."""


def _may_wait(request: Request) -> bool:
    """FINAL_ONLY, no stop strings, no logprobs: nothing the front-end must see token by token.

    The capability's table knows all fields of an output: an unknown one must not be delayed or lost.
    """
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.stop
        and params.num_logprobs is None
        and not request.resumable
    )


def _is_plain(output: EngineCoreOutput) -> bool:
    """Whether it holds token ids and nothing else."""
    return (
        output.finish_reason is None
        and output.events is None
        and output.prefill_stats is None
        and output.new_logprobs is None
        and output.new_sampling_mask is None
        and output.routed_experts is None
        and not output.num_nans_in_logits
    )
