"""What a front-end can carry: vLLM's API server, our replica and our gateway, on a core that costs nothing.

    python -m benchmarks.front [--streams 64,256] [--tokens 64,512] [--every 0] [--rounds 3] [--json FILE]

The core (`free_core`) gives each open request a token as soon as the front-end has taken the last one, so the
front-end is the limit. Processes run without Ray. "us/token" are CPU microseconds of one process; 1 s divided
by them is what that process alone can do on a core of its own, also where here two of them shared one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import free_core
from benchmarks.command import choices, cleaned_up, demo_model, numbers, say
from benchmarks.contestants import free_port
from benchmarks.fleet import NODE, Child, Gateway
from benchmarks.record import Record
from benchmarks.table import Row, markdown
from benchmarks.trial import Question, Trial, run
from benchmarks.workload import MODEL_ID, Workload

_CORE = "benchmarks.free_core"
_MOST_IDS = 64
_READY_S = 300.0
_HEAD = (
    *("tokens", "streams", "what", "tok/s", "front us/token", "gateway us/token", "all, of vLLM"),
    *("limit tok/s", "of vLLM", "tokens an event", "TTFT p50 ms", "ITL p99 ms", "failed"),
)


class Front(Child):
    """A front-end on a free core: "vllm" is vLLM's API server, "replica" ours."""

    module = "benchmarks.front"

    def __init__(self, kind: str, model: Path, core: free_core.Options) -> None:
        super().__init__(kind, model=str(model), core=asdict(core))

    @property
    def port(self) -> int:
        return self.said["port"]

    @property
    def headers(self) -> list[str]:
        return [f"x-penstock-secret: {self.said['secret']}"] if "secret" in self.said else []


async def _serve_vllm(model: str, core: dict[str, Any]) -> dict[str, Any]:
    """vLLM's API server as vLLM runs it when several share their cores."""
    from vllm.entrypoints.launchers import cli_args, launcher
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    port, folder = free_port(), tempfile.mkdtemp(prefix="bench-")
    words = ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log", "--model", model]
    words += ["--served-model-name", MODEL_ID, *Workload(Path(model), "uni").engine_flags()]
    args = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    cli_args.validate_parsed_serve_args(args)
    address, sock = launcher.setup_server(args, reuse_port=False)
    addresses = [f"ipc://{folder}/{name}" for name in ("input", "output")]
    _kept.append(await asyncio.create_subprocess_exec(sys.executable, "-m", _CORE, *addresses))
    config = dict(zip(("input_address", "output_address"), addresses, strict=True))
    _kept.append(asyncio.create_task(run_server_worker(address, sock, args, config)))
    await _answers(port)
    return {"port": port}


async def _answers(port: int) -> None:
    async with asyncio.timeout(_READY_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                return writer.close()


async def _serve_replica(model: str, core: dict[str, Any]) -> dict[str, Any]:
    """vLLM's adapter behind a replica's own listener."""
    from penstock.config import LLMConfig
    from penstock.engines.vllm.core import launch
    from penstock.engines.vllm.engine import VLLMEngine
    from penstock.serve.replica.inbound.listener import Listener
    from penstock.serve.replica.inbound.status_link import StatusSource
    from penstock.transport import link

    launch._MODULE = _CORE
    config = {
        "model_loading_config": {"model_id": MODEL_ID, "model_source": model},
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": Workload(Path(model), "uni").engine_kwargs(),
    }
    engine = VLLMEngine(LLMConfig.model_validate(config))
    await engine.start()
    facts = StatusSource(load=engine.load, hello=lambda: link.Hello(MODEL_ID, engine.max_model_len()))
    listener = await Listener.open(engine.app(), facts, node_id=NODE, node_host="127.0.0.1")
    await listener.sockets.listen_on_network()
    _kept.extend((engine, listener))
    return listener.address.to_metadata()


_kept: list[object] = []
_KINDS = {"vllm": _serve_vllm, "replica": _serve_replica}


async def _serve(kind: str, model: str, core: dict[str, Any]) -> None:
    from penstock.processes import lifeline

    lifeline.tie_to(os.getppid())
    os.environ[free_core.OPTIONS] = json.dumps(core)
    if not core["every_s"]:  # a paced core does not wait
        free_core.acknowledge(core["taken"])
    print(json.dumps(await _KINDS[kind](model, core)), flush=True)
    await asyncio.Event().wait()


class Result:
    """Trials of one contestant under one load, of all rounds."""

    def __init__(self, name: str, trials: Sequence[Trial], tokens: int) -> None:
        self.name = name
        self._trials = trials
        self._tokens = tokens
        self.parts = [self._us(part) for part in range(len(trials[0].cpu_s))]

    def median(self, figures: Sequence[float]) -> float:
        return statistics.median(figures)

    def _per_event(self, trial: Trial) -> float:
        events = trial["good_events_all"]
        return trial["requests_all"] * self._tokens / events if events else 1.0

    def _us(self, part: int) -> float:
        """CPU microseconds a token, the least of all rounds: what others do adds to it."""
        return min(
            1e6 * trial.cpu_s[part] / max(1.0, trial["events_all"] * self._per_event(trial))
            for trial in self._trials
        )

    def row(self, streams: int, vllm: Result | None) -> Row:
        tokens_per_s = self.median([t.events_per_s * self._per_event(t) for t in self._trials])
        limit = 1e6 / max(self.parts)
        return [
            *(str(self._tokens), str(streams), self.name, f"{tokens_per_s:,.0f}"),
            f"{self.parts[0]:.1f}",
            f"{self.parts[1]:.1f}" if len(self.parts) > 1 else "",
            f"{sum(self.parts) / sum(vllm.parts):.2f}" if vllm else "",
            f"{limit:,.0f}",
            f"{limit * sum(vllm.parts) / 1e6:.2f}" if vllm else "",
            f"{self.median([self._per_event(t) for t in self._trials]):.2f}",
            f"{self.median([t.ms('p50', 'ttft_ms') for t in self._trials]):.1f}",
            f"{self.median([t.ms('p99', 'itl_ms') for t in self._trials]):.1f}",
            str(sum(t.failed for t in self._trials)),
        ]


_NAMES = {"vllm": "vLLM's API server", "replica": "replica, asked straight", "gateway": "gateway and replica"}


def _measure(options: argparse.Namespace) -> tuple[list[Row], list[dict[str, Any]]]:
    """Every contestant runs through all rounds; only the one that is asked works."""
    core = free_core.Options("", _printable(options.model), options.every, options.ahead)
    found: dict[tuple[int, int, str], list[Trial]] = {}
    with tempfile.TemporaryDirectory() as folder:
        fronts = {
            kind: Front(kind, options.model, _at(core, f"{folder}/{kind}")) for kind in ("vllm", "replica")
        }
        replica: Any = fronts["replica"]
        with fronts["vllm"] as vllm, fronts["replica"], Gateway(replica) as gateway:
            asked = {
                "vllm": (vllm, [vllm]),
                "replica": (replica, [replica]),
                "gateway": (gateway, [replica, gateway]),
            }
            for number in range(options.rounds):
                for tokens, streams in _loads(options):
                    for name in options.only:
                        say(f"round {number + 1}: {tokens} tokens, {streams} streams, {_NAMES[name]}")
                        target: Any = asked[name][0]
                        trial = run(
                            name, target, asked[name][1], Question(True, tokens),
                            streams=streams, seconds=options.seconds, warmup_s=options.warmup,
                        )  # fmt: skip
                        found.setdefault((tokens, streams, name), []).append(trial)
    rows: list[Row] = []
    for tokens, streams in _loads(options):
        results = {name: Result(_NAMES[name], found[tokens, streams, name], tokens) for name in options.only}
        rows += [result.row(streams, results.get("vllm")) for result in results.values()]
    return rows, [trial.to_json() for trials in found.values() for trial in trials]


def _loads(options: argparse.Namespace) -> list[tuple[int, int]]:
    return [(tokens, streams) for tokens in options.tokens for streams in options.streams]


def _at(core: free_core.Options, path: str) -> free_core.Options:
    return free_core.Options(path, core.token_ids, core.every_s, core.ahead)


def _printable(model: Path) -> list[int]:
    """Tokens that are text by themselves: each makes an event."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    texts = ((token_id, tokenizer.decode([token_id])) for token_id in range(tokenizer.vocab_size))
    found = [i for i, text in texts if text.strip().isalnum() and text.isascii()]
    return found[-_MOST_IDS:]


def main() -> int:
    """Prints what was measured."""
    options = _options()
    os.environ.update(Workload(options.model, "uni").environment(Path("/tmp")))
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # standard output is for what a front-end says
    record = Record(settings={name: str(value) for name, value in vars(options).items()})
    with cleaned_up():
        rows, trials = _measure(options)
    print(markdown(_HEAD, rows))
    if options.json:
        options.json.write_text(json.dumps({**record.to_json(), "trials": trials}, indent=1) + "\n")
    return 1 if any(row[-1] != "0" for row in rows) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front", description=_FIRST_LINE)
    add = parser.add_argument
    add("--only", type=choices(list(_NAMES)), default=list(_NAMES), help=f"some of {','.join(_NAMES)}")
    add("--streams", type=numbers, default=[64, 256], metavar="N,N", help="concurrent requests")
    add("--tokens", type=numbers, default=[64, 512], metavar="N,N", help="tokens of each answer")
    add("--every", type=float, default=0.0, help="seconds from one token to the next (default: as taken)")
    add("--ahead", type=int, default=1, help="steps that the core may be ahead of the front-end")
    add("--rounds", type=int, default=3, help="how often every contestant has its turn")
    add("--seconds", type=float, default=5.0, help="measured seconds of each run")
    add("--warmup", type=float, default=1.0, help="seconds of load before each measured run")
    add("--model", type=Path, default=demo_model(), help="model folder (default: the embedded demo model)")
    add("--json", type=Path, default=None, metavar="FILE", help="write everything to this file")
    return parser.parse_args()


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in _KINDS:
        import uvloop

        given = json.loads(sys.argv[2])
        uvloop.run(_serve(sys.argv[1], **given))
    else:
        sys.exit(main())
