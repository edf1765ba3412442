"""What classes of work cost online where there is no batch: `python -m benchmarks.one_fleet_cost`.

Two replicas of the simulator, which takes no time, asked straight: one lets batch run in turns, one knows no
classes. They are asked one after the other in each round, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import Any

from benchmarks.fleet import Replica
from benchmarks.table import markdown
from benchmarks.trial import Question, Trial, run
from penstock.asgi import ASGIApp, Receive, Scope, Send
from penstock.engine import Load
from penstock.serve.replica.tiers.controller import Targets
from penstock.serve.replica.tiers.layer import ByClass, Turns
from penstock.serve.replica.tiers.share import BatchShare

ENGINE: dict[str, Any] = {
    "step_base_ms": 0.0,
    "step_per_request_ms": 0.0,
    "prefill_tokens_per_s": 1e9,
    "reply": "word " * 64,
}
HEAD = ("tokens an answer", "streams", "CPU us/token without", "with", "ratio", "TTFT p50 ms without", "with")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    print(f"The layer alone: {layer_us():.2f} us of CPU a request\n")
    rows = []
    with Replica("sim", **ENGINE) as without, Replica("sim", slo={}, **ENGINE) as with_classes:
        for tokens, streams in ((8, 1), (64, 1), (64, 16)):
            trials: dict[Replica, list[Trial]] = {without: [], with_classes: []}
            for _ in range(given.rounds):
                for replica, found in trials.items():
                    question = Question(True, tokens)
                    found.append(
                        run("", replica, [replica], question, streams=streams, seconds=given.seconds)
                    )
            rows.append(row(tokens, streams, trials[without], trials[with_classes]))
    print(markdown(HEAD, rows))


def layer_us(requests: int = 20_000, rounds: int = 9) -> float:
    """What the layer and the report of the first token add to a request: the least of all rounds."""
    share = BatchShare(Load, Targets(), time.monotonic)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    async def app_of_replica(scope: Scope, receive: Receive, send: Send) -> None:
        share.first_token(0.01)

    def spent_us(asked: ASGIApp) -> float:
        async def ask() -> None:
            for _ in range(requests):
                await asked({"type": "http", "method": "POST"}, None, None)  # pyright: ignore[reportArgumentType]

        begun = time.process_time()
        asyncio.run(ask())
        return 1e6 * (time.process_time() - begun) / requests

    layered = ByClass(app_of_replica, Turns(share))
    return min(spent_us(layered) for _ in range(rounds)) - min(spent_us(app) for _ in range(rounds))


def row(tokens: int, streams: int, without: list[Trial], with_classes: list[Trial]) -> list[str]:
    """The least of all rounds: what others do on the machine adds to it."""
    before, after = (
        1e6 * min(cpu_s(trial, tokens) for trial in trials) for trials in (without, with_classes)
    )
    ttft = [
        f"{min(t.ms('p50', 'ttft_ms') for t in trials if t['requests']):.3f}"
        for trials in (without, with_classes)
    ]
    return [str(tokens), str(streams), f"{before:.1f}", f"{after:.1f}", f"{before / after:.3f}", *ttft]


def cpu_s(trial: Trial, tokens: int) -> float:
    """Of the replica, a token."""
    return trial.cpu_s[0] / max(1, trial["requests_all"] * tokens)


if __name__ == "__main__":
    main()
