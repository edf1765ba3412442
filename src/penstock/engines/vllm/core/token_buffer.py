"""vLLM's core that tells its front of an answer in few pieces, where nobody reads along.

A request whose caller wants the whole answer only costs the front as much for each token as a stream does:
a message, its decoding, a step of the statistics. Here its tokens wait in the core until there are some.
Only `core` imports this file: it imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, PauseMode
from vllm.v1.engine.core import DPEngineCoreProc
from vllm.v1.request import Request

from penstock.engines.vllm.core.sockets import AttentiveCore

_PIECE = 16
"""Tokens. Of the cost of each a sixteenth stays; counters of tokens lag by so many for each request."""

_FRONT = 0
"""vLLM's number of the only front that a core of ours has."""

Outputs = dict[int, EngineCoreOutputs]


class Gathered:
    """Token ids of open requests that the front has not been told of."""

    def __init__(self) -> None:
        self._held: dict[str, list[int]] = {}

    def open(self, request: Request) -> None:
        """Gathers for it from now on, if it may wait."""
        if _may_wait(request):
            self._held[request.request_id] = []

    def drop(self, request_ids: Iterable[str]) -> None:
        """Of requests whose caller is gone."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def passing(self, outputs: Iterable[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Those of a step that go to the front now, with all that was held before them."""
        return [output for output in outputs if self._passes(output)]

    def _passes(self, output: EngineCoreOutput) -> bool:
        held = self._held.get(output.request_id)
        if held is None:
            return True
        held += output.new_token_ids
        if len(held) < _PIECE and _is_plain(output):
            return False
        output.new_token_ids = held
        if output.finished:
            del self._held[output.request_id]
        else:
            self._held[output.request_id] = []
        return True

    def rest(self) -> list[EngineCoreOutput]:
        """All that is held, which is not any more."""
        told = [EngineCoreOutput(request_id, held) for request_id, held in self._held.items() if held]
        self._held = {request_id: [] for request_id in self._held}
        return told


class GatheringCore(AttentiveCore):
    """Its base, with fewer outputs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._gathered = Gathered()
        super().__init__(*args, **kwargs)

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        super().add_request(request, request_wave)
        if not request.is_finished():  # it may be there only to be aborted
            self._gathered.open(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._gathered.drop(request_ids)
        super().abort_requests(request_ids)

    def step(self) -> tuple[Outputs, bool]:
        outputs, executed = super().step()
        return self._fewer(outputs), executed

    def step_with_batch_queue(self) -> tuple[Outputs | None, bool]:
        outputs, executed = super().step_with_batch_queue()
        return outputs and self._fewer(outputs), executed

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Future[Any] | None:
        """What was made before belongs before: an answer that is cut off here has all its tokens, and the
        weights that made them are those of now."""
        if rest := self._gathered.rest():
            told = EngineCoreOutputs(outputs=rest, weight_version=self.get_weight_version())
            self.output_queue.put_nowait((_FRONT, told))
        if mode == "abort":  # of every request
            self._gathered = Gathered()
        return super().pause_scheduler(mode, clear_cache)

    def _fewer(self, outputs: Outputs) -> Outputs:
        for told in outputs.values():
            told.outputs = self._gathered.passing(told.outputs)
        return outputs


class GatheringMember(GatheringCore, DPEngineCoreProc):
    """The same for a core of a gang, which steps with the others: its first base goes before its second."""


def _may_wait(request: Request) -> bool:
    """Whether its answer is told at its end, and its end does not hang on a text that only the front sees."""
    params = request.sampling_params
    return (
        _KNOWS_OUTPUTS
        and params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.stop
        and params.num_logprobs is None
        and not request.resumable
    )


_KNOWS_OUTPUTS = set(EngineCoreOutput.__struct_fields__) == {
    *("request_id", "new_token_ids"),
    # Looked at below.
    *("finish_reason", "events", "prefill_stats", "new_logprobs", "new_sampling_mask", "routed_experts"),
    "num_nans_in_logits",
    # With the first output or the last one.
    *("new_prompt_logprobs_tensors", "prompt_token_id_logprobs", "pooling_output", "stop_reason"),
    *("kv_transfer_params", "ec_transfer_params", "trace_headers", "mm_cache_miss_hashes"),
    "spec_decode_metrics",
}
"""Another vLLM may tell more with each token, which must not wait or be lost."""


def _is_plain(output: EngineCoreOutput) -> bool:
    """Token ids and nothing else."""
    return (
        output.finish_reason is None
        and output.events is None
        and output.prefill_stats is None
        and output.new_logprobs is None
        and output.new_sampling_mask is None
        and output.routed_experts is None
        and not output.num_nans_in_logits
    )
