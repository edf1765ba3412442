"""What long prompts do to the streams beside them: on one engine, on two, and with prefill apart.

    python -m benchmarks.prefill [--rounds 3] [--seconds 15] [--prompt 3000] [--json FILE]

Talkers stream short chats without a pause; readers send long prompts, each of them new. "killed": prefill
apart, and its replica is killed in the middle of the measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import yaml

from benchmarks.command import add_common, cleaned_up, refuse_strangers, say
from benchmarks.contestants import Contestant, Running, penstock_serve
from benchmarks.table import markdown
from benchmarks.workload import MODEL_ID, Workload

TALKERS, READERS = 8, 2
_REPLICA = re.compile(r"ray::ServeReplica:.*:Prefill")
_LIMIT_S = 120.0
_WARM_S = 3.0

SIDES: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"deployment_config": {"num_replicas": 2}},
    "apart": {"prefill": {}},
    "killed": {"prefill": {}},
}


@dataclass
class Seen:
    """Units: seconds. gaps: between two events of a talker's stream. firsts: a reader's first byte."""

    gaps: list[float] = field(default_factory=list[float])
    firsts: list[float] = field(default_factory=list[float])
    tokens: int = 0
    failures: list[str] = field(default_factory=list[str])


def main() -> int:
    options = _options()
    with cleaned_up():
        refuse_strangers(options.shared)
        workload = Workload(options.model, "uni", options.tokens)
        found: dict[str, list[Seen]] = {side: [] for side in SIDES}
        for number in range(options.rounds):
            for side in SIDES:
                seen = _measured(side, workload, options.seconds, options.prompt)
                say(
                    f"    round {number + 1}, {side}: {len(seen.firsts)} prompts, {len(seen.failures)} failed"
                )
                found[side].append(seen)
    titles = ["engines", "talkers' gap p50 ms", "p99", "tok/s", "readers' TTFT p50 ms", "prompts", "failed"]
    measured = {side: rounds for side, rounds in found.items() if rounds}
    print(markdown(titles, [[side, *_row(rounds, options.seconds)] for side, rounds in measured.items()]))
    if options.json:
        options.json.write_text(json.dumps({side: list(map(asdict, all_)) for side, all_ in found.items()}))
    return 0


def _row(rounds: list[Seen], seconds: float) -> list[str]:
    def middle(figure: Callable[[Seen], float]) -> float:
        return median(map(figure, rounds))

    return [
        f"{1000 * middle(lambda seen: _quantile(seen.gaps, 0.5)):.1f}",
        f"{1000 * middle(lambda seen: _quantile(seen.gaps, 0.99)):.0f}",
        f"{middle(lambda seen: seen.tokens / seconds):.0f}",
        f"{1000 * middle(lambda seen: _quantile(seen.firsts, 0.5)):.0f}",
        f"{middle(lambda seen: len(seen.firsts)):.0f}",
        str(sum(len(seen.failures) for seen in rounds)),
    ]


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))] if values else float("nan")


def _measured(side: str, workload: Workload, seconds: float, prompt_tokens: int) -> Seen:
    contestant = Contestant(side, side, _command(SIDES[side]))
    running = Running.start(contestant, workload)
    try:
        running.first_token(workload)
        return asyncio.run(_load(running, seconds, prompt_tokens, kill=side == "killed"))
    finally:
        running.stop()
        running.forget()


def _command(parts: dict[str, Any]) -> Callable[[Workload, int, Path], list[str]]:
    def command(workload: Workload, port: int, folder: Path) -> list[str]:
        words = penstock_serve(workload, port, folder)
        config = folder / "bench.yaml"
        one: dict[str, Any] = yaml.safe_load(config.read_text())
        one["engine_kwargs"]["max_model_len"] = 4096
        config.write_text(yaml.safe_dump(one | parts))
        return words

    return command


async def _load(running: Running, seconds: float, prompt_tokens: int, kill: bool) -> Seen:
    url = f"http://127.0.0.1:{running.port}/v1/completions"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_LIMIT_S)) as http:
        await _all_of(http, url, Seen(), _WARM_S, prompt_tokens)
        seen = Seen()
        if kill:
            asyncio.get_running_loop().call_later(seconds / 2, _kill, running)
        await _all_of(http, url, seen, seconds, prompt_tokens)
        return seen


async def _all_of(
    http: aiohttp.ClientSession, url: str, seen: Seen, seconds: float, prompt_tokens: int
) -> None:
    until = time.monotonic() + seconds
    talkers = [_talk(http, url, seen, until) for _ in range(TALKERS)]
    readers = [_read(http, url, seen, until, prompt_tokens) for _ in range(READERS)]
    await asyncio.gather(*talkers, *readers)


async def _talk(http: aiohttp.ClientSession, url: str, seen: Seen, until: float) -> None:
    body = {"model": MODEL_ID, "prompt": "def foo(x):", "max_tokens": 64, "ignore_eos": True, "stream": True}
    while time.monotonic() < until:
        before = None
        async for at, event in _events(http, url, body, seen):
            if before is not None and b"[DONE]" not in event:
                seen.gaps.append(at - before)
            seen.tokens += event.count(b'"text"')
            before = at


async def _read(http: aiohttp.ClientSession, url: str, seen: Seen, until: float, tokens: int) -> None:
    while time.monotonic() < until:
        prompt = [random.randrange(10, 400) for _ in range(tokens)]
        body = {"model": MODEL_ID, "prompt": prompt, "max_tokens": 1, "stream": True}
        began = time.monotonic()
        firsts = [at - began async for at, _ in _events(http, url, body, seen)]
        seen.firsts += firsts[:1]


async def _events(http: aiohttp.ClientSession, url: str, body: dict[str, Any], seen: Seen) -> Any:
    """When each piece came, and the piece; what failed is noted."""
    last = b""
    try:
        async with http.post(url, json=body) as answer:
            async for piece in answer.content.iter_any():
                last = piece
                if answer.status == 200:
                    yield time.monotonic(), piece
            if answer.status != 200 or b"[DONE]" not in last:
                seen.failures.append(f"{answer.status} {last[-300:]!r}")
    except (aiohttp.ClientError, TimeoutError) as error:
        seen.failures.append(repr(error))


def _kill(running: Running) -> None:
    for process in running.processes():
        if _REPLICA.search(" ".join(process.cmdline())):
            process.send_signal(signal.SIGKILL)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefill", description=_FIRST_LINE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--prompt", type=int, default=3000, help="tokens of a reader's prompt")
    add_common(parser)
    return parser.parse_args()


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    sys.exit(main())
