"""An engine core that costs nothing: every open request gets a token as fast as tokens are taken.

It speaks vLLM's protocol between front-end and core, so that real front-ends run on it: `benchmarks.front`
starts it in place of the engine. As a replica's own core (`engines.vllm.core.launch`) it reads its order from
standard input and makes the handshake; with two addresses as arguments, as vLLM's API servers get them, it
has nothing but them.

A front-end says by one byte on a socket that it has taken a message (`acknowledge`). Then comes the next one,
so that one is always there while another is worked on.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from penstock.processes import lifeline

OPTIONS = "BENCH_FREE_CORE"
"""Environment variable: the fields of `Options` as JSON."""

_IDENTITY = (0).to_bytes(2, "little")
_MODEL_LEN, _BLOCKS, _BLOCK_TOKENS = 1024, 4096, 16


@dataclass(frozen=True, slots=True)
class Options:
    """taken: path of the socket on which the front-end acknowledges. every_s: at least so long from one token
    to the next, 0 for none. ahead: messages that may be on their way. token_ids: what is generated, in turn.
    """

    taken: str
    token_ids: Sequence[int]
    every_s: float = 0.0
    ahead: int = 1


@dataclass(slots=True)
class _Open:
    """A request: tokens that it has and may have."""

    id: str
    prompt_tokens: int
    most: int
    made: int = 0


class FreeCore:
    """Connects to a front-end's sockets and serves it until the process is ended."""

    def __init__(self, input_address: str, output_address: str, options: Options) -> None:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        self._options = options
        self._requests: dict[str, _Open] = {}
        self._encode = MsgpackEncoder().encode
        self._request, self._other = MsgpackDecoder(EngineCoreRequest), MsgpackDecoder()
        self._on_their_way = 0
        self._next_at = 0.0
        self._taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._taken.bind(options.taken)
        self._taken.setblocking(False)
        context = zmq.Context()
        self._input, self._output = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
        self._input.setsockopt(zmq.IDENTITY, _IDENTITY)
        self._output.setsockopt(zmq.SNDHWM, 0)
        self._input.connect(input_address)
        self._output.connect(output_address)
        self._input.send(msgspec.msgpack.encode(_ready()))

    def serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._input, zmq.POLLIN)
        poller.register(self._taken, zmq.POLLIN)
        while True:
            for found, _ in poller.poll(self._wait_ms()):
                if found is self._input:
                    self._listen()
                else:
                    self._on_their_way -= _count(self._taken)
            if self._may_step() and time.monotonic() >= self._next_at:
                self._step()

    def _may_step(self) -> bool:
        taken = self._options.every_s > 0 or self._on_their_way < self._options.ahead
        return taken and bool(self._requests)

    def _wait_ms(self) -> float | None:
        return max(0.0, 1e3 * (self._next_at - time.monotonic())) if self._may_step() else None

    def _step(self) -> None:
        now = time.monotonic()
        self._next_at = max(self._next_at + self._options.every_s, now) if self._options.every_s else 0.0
        self._on_their_way += 1
        outputs = [self._output_of(request, now) for request in self._requests.values()]
        ended = {output.request_id for output in outputs if output.finish_reason is not None}
        self._send(outputs=outputs, finished_requests=ended or None, scheduler_stats=self._stats())
        for request_id in ended:
            del self._requests[request_id]

    def _output_of(self, request: _Open, now: float) -> Any:
        from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
        from vllm.v1.metrics.stats import PrefillStats

        ids = self._options.token_ids
        output = EngineCoreOutput(request.id, [ids[request.made % len(ids)]])
        if not request.made:
            kinds = (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)
            output.events = [EngineCoreEvent(kind, now) for kind in kinds]
            output.prefill_stats = PrefillStats(request.prompt_tokens, request.prompt_tokens)
        request.made += 1
        if request.made >= request.most:
            output.finish_reason = FinishReason.LENGTH
        return output

    def _stats(self) -> Any:
        from vllm.v1.metrics.stats import SchedulerStats

        return SchedulerStats(num_running_reqs=len(self._requests))

    def _send(self, **fields: Any) -> None:
        from vllm.v1.engine import EngineCoreOutputs

        self._output.send_multipart(self._encode(EngineCoreOutputs(**fields)))

    def _listen(self) -> None:
        from vllm.v1.engine import EngineCoreRequestType as Type

        while self._input.poll(0):
            kind, *frames = self._input.recv_multipart()
            if kind == Type.ADD.value:
                self._add(self._request.decode(frames))
            elif kind == Type.ABORT.value:
                for request_id in self._other.decode(frames):
                    self._requests.pop(request_id, None)
            elif kind == Type.UTILITY.value:
                self._call(*self._other.decode(frames))

    def _add(self, request: Any) -> None:
        most = request.sampling_params.max_tokens or _MODEL_LEN
        self._requests[request.request_id] = _Open(request.request_id, len(request.prompt_token_ids), most)

    def _call(self, _client: int, call_id: int, method: str, _arguments: Any) -> None:
        from vllm.v1.engine import UtilityOutput
        from vllm.v1.serial_utils import UtilityResult

        result = ("generate",) if method == "get_supported_tasks" else None
        self._send(utility_output=UtilityOutput(call_id, result=UtilityResult(result)))


def acknowledge(path: str) -> None:
    """Makes the vLLM front-end of this process say what it takes: by vLLM's own hook, before each message is
    worked on.
    """
    from vllm.v1.engine.core_client import AsyncMPClient

    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.setblocking(False)

    async def taken(_client: Any, outputs: Any) -> None:
        if outputs.outputs:
            sock.sendto(b".", path)

    AsyncMPClient.process_engine_outputs = taken


def _count(sock: socket.socket) -> int:
    count = 0
    while True:
        try:
            count += len(sock.recv(1))
        except BlockingIOError:
            return count


def _ready() -> Any:
    from vllm.v1.engine import EngineCoreReadyResponse

    sizes = ("world_size", "data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    return EngineCoreReadyResponse(
        max_model_len=_MODEL_LEN,
        num_gpu_blocks=_BLOCKS,
        block_size=_BLOCK_TOKENS,
        dp_stats_address=None,
        dtype="float32",
        vllm_version="",
        **dict.fromkeys((*sizes, "decode_context_parallel_size"), 1),
        data_parallel_rank=0,
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        instance_id="free",
        supports_lora=False,
        max_loras=0,
    )


def _handshake(address: str) -> tuple[str, str]:
    """Addresses of the front-end's input and output."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.IDENTITY, _IDENTITY)
        dealer.connect(address)
        dealer.send(msgspec.msgpack.encode({"status": "HELLO", "local": True, "headless": False}))
        addresses = msgspec.msgpack.decode(dealer.recv())["addresses"]
        dealer.send(msgspec.msgpack.encode({"status": "READY", "local": True, "headless": False}))
    return addresses["inputs"][0], addresses["outputs"][0]


def _order() -> Any:
    """What a replica gives its core: first the environment, which does not matter here."""
    pickle.load(sys.stdin.buffer)
    return pickle.load(sys.stdin.buffer)


def main() -> None:
    lifeline.tie_to(os.getppid())
    given = sys.argv[1:] or _handshake(_order()["handshake_address"])
    options = Options(**json.loads(os.environ[OPTIONS]))
    FreeCore(given[0], given[1], options).serve()


if __name__ == "__main__":
    main()
