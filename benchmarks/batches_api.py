"""The process of files and batches: its memory, and its CPU per line beside a job of the same rows.

    python -m benchmarks.batches_api [--lines 50000] [--bytes 4096]

Engines answer at once, in the same process: what is left is the machinery. The API is asked by OpenAI's
client in another process; the job reads the same file by `penstock.data`, as `penstock batch` does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import openai
import psutil

from benchmarks.command import say
from benchmarks.table import markdown

_PATH = "/v1/chat/completions"
_IN_FLIGHT = 256
_ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "word " * 50}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 1000, "completion_tokens": 50, "total_tokens": 1050},
    }
).encode()
_PROCESSES = multiprocessing.get_context("spawn")
_MIB = 2**20


def write_lines(path: Path, lines: int, size_bytes: int) -> None:
    with path.open("w") as file:
        for number in range(lines):
            text = f"{number} ".ljust(size_bytes - 200, "x")
            body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 50}
            row = {"custom_id": f"row-{number}", "method": "POST", "url": _PATH, "body": body}
            file.write(f"{json.dumps(row)}\n")


def _pool() -> Any:
    from penstock.data.backends.protocol import Response
    from penstock.data.job.worker import InProcessPool

    class AtOnce:
        async def start(self, progress: Any = None) -> None: ...

        async def stop(self) -> None: ...

        async def send(self, request: Any) -> Response:
            await asyncio.sleep(0)
            return Response(200, _ANSWER)

        def available_slots(self, in_flight: int) -> int:
            return max(0, _IN_FLIGHT - in_flight)

    return InProcessPool(AtOnce)


def _serve(tells: Connection, storage: str) -> None:
    from penstock.config.schema.jobs import JobsConfig
    from penstock.jobs.app import make_app
    from penstock.jobs.service import JobService
    from penstock.serve.http.server import serve_on

    async def serve() -> None:
        service = JobService(
            JobsConfig(), storage, lambda name: (name or "m", ""), lambda models, standing: _pool()
        )
        await service.start()
        await service.wait_ready()
        port = await serve_on(make_app(service), "127.0.0.1", 0)
        tells.send(port.number)
        await asyncio.Event().wait()

    asyncio.run(serve())


def _run_job(tells: Connection, source: str, output: str) -> None:
    from penstock.data.job.job import Job
    from penstock.data.job.spec import JobSpec

    tells.send(0)
    tells.recv()
    spec = JobSpec(inputs=(source,), output=output, input_form="jsonl", reuse="off", read_files=False)
    asyncio.run(Job(spec, _pool()).run())
    tells.send(1)
    tells.recv()


def through_the_api(source: Path, folder: Path, lines: int) -> list[str]:
    def batch(_: Connection, port: int) -> None:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", timeout=600)
        with source.open("rb") as content:
            file = client.files.create(file=content, purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint=_PATH, completion_window="24h")
        while made.status in ("validating", "in_progress", "finalizing"):
            time.sleep(0.5)
            made = client.batches.retrieve(made.id)
        with client.files.with_streaming_response.content(made.output_file_id or "") as answers:
            found = [json.loads(line)["custom_id"] for line in answers.iter_lines() if line]
        assert found == [f"row-{number}" for number in range(lines)], made

    return _measured("through the API", lines, _serve, (str(folder / "jobs"),), batch)


def by_a_job(source: Path, folder: Path, lines: int) -> list[str]:
    def run(told: Connection, _: int) -> None:
        told.send(None)
        told.recv()

    return _measured("by a job", lines, _run_job, (str(source), str(folder / "out.jsonl")), run)


def _measured(
    name: str,
    lines: int,
    target: Callable[..., None],
    arguments: tuple[str, ...],
    work: Callable[[Connection, int], None],
) -> list[str]:
    """A row of the table."""
    ours, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        port = ours.recv()
        seen = psutil.Process(process.pid)
        before, before_mib = sum(seen.cpu_times()[:2]), _peak_mib(seen)
        work(ours, port)
        spent, most_mib = sum(seen.cpu_times()[:2]) - before, _peak_mib(seen)
    finally:
        process.kill()
        process.join()
    return [name, f"{lines:,}", f"{1e6 * spent / lines:.0f}", f"{before_mib:.0f}", f"{most_mib:.0f}"]


def _peak_mib(process: psutil.Process) -> float:
    """Resident memory at most, so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / _MIB


def main(words: Sequence[str] | None = None) -> int:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches_api")
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--bytes", type=int, default=4096, help="of a line")
    options = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp(prefix="batches-api-"))
    try:
        source = folder / "in.jsonl"
        say(f"{options.lines:,} lines of {options.bytes:,} bytes")
        write_lines(source, options.lines, options.bytes)
        rows = [measure(source, folder, options.lines) for measure in (through_the_api, by_a_job)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(markdown(["", "lines", "CPU, us a line", "MiB at the start", "MiB at most"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
