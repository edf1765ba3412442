"""`penstock bench` against real sockets: the simulator, whose times are known, and bad services."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from served import Served, until

from penstock.asgi import Receive, Scope, Send
from penstock.bench.load.client import Client
from penstock.bench.load.conversations import RequestWriter
from penstock.bench.load.driver import LevelRun, LoadPlan
from penstock.bench.load.workers import Measured
from penstock.bench.report.command import Files, measure
from penstock.bench.run.figures import Figures
from penstock.bench.run.figures import figures as figures_of
from penstock.bench.run.probe import probe
from penstock.bench.run.session import Result, Watcher, run
from penstock.bench.run.settings import BenchOptions, BenchSettings
from penstock.errors import ConfigError, Error, ModelNotFound, Unauthorized, Unavailable

pytestmark = pytest.mark.parity("S30")

STEP_MS = 100.0  # long against what a busy machine adds
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n'
DONE = b"data: [DONE]\n\n"
GOOD = TOKEN * 2 + LAST + USAGE % (9, 2) + DONE


SMALL: dict[str, Any] = {
    "concurrency": "2",
    "requests": 4,
    "warmup": 0.0,
    "input": "16",
    "output": "4",
}


async def measured(url: str, **words: Any) -> Result:
    """A run as one worker does it, in this process."""
    settings = BenchSettings.of(BenchOptions(url, **{**SMALL, **words}))
    work, notes = await probe(settings)
    result, client = Result(settings, work, notes), Client(settings.target)
    plan = LoadPlan(settings.target, work, settings.options.timeout, settings.options.think)
    for level in settings.levels:
        seen = Measured(level, time.monotonic())
        level_run = LevelRun(plan, RequestWriter(work), client, level, seen.start)
        await level_run.run()
        seen.outcomes = level_run.outcomes
        result.levels.append((figures_of(seen, settings.slo), seen))
    client.close()
    return result


async def measured_by_processes(url: str, **words: Any) -> Result:
    """A run as the command does it."""
    settings = BenchSettings.of(BenchOptions(url, **{**SMALL, **words}))
    return await asyncio.to_thread(run, settings, Watcher())


async def only(url: str, **words: Any) -> Figures:
    (figures,) = (await measured(url, **words)).figures
    return figures


@asynccontextmanager
async def service(
    answer: Callable[[int, asyncio.StreamWriter], Any], *, trials: int = 4, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """Writes by hand what `answer` gives for the n-th request after the client's trials, which go well.

    Bytes it returns are the events of a stream that ends well.
    """
    asked = -trials - 1

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    writer.write(_sized(200, b'{"data":[{"id":"m"}]}'))
                    continue
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                asked += 1
                events = GOOD if asked < 0 else answer(asked, writer)
                events = await events if asyncio.iscoroutine(events) else events
                if events is not None:
                    writer.write(_stream(events) + b"0\r\n\r\n")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls) as server:
        port = server.sockets[0].getsockname()[1]
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"


def _sized(status: int, body: bytes) -> bytes:
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def _stream(events: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n" % (len(events), events)


def failures(figures: Figures) -> dict[tuple[str, bool], int]:
    return {(failure.kind, failure.begun): failure.count for failure in figures.failures}


# -- against the simulator


async def simulator(served: Served, **options: Any) -> str:
    await served.gateway("m")
    await served.replica("m", **{"step_base_ms": 1, "step_per_request_ms": 0, **options})
    return served.url


async def test_times_are_those_of_the_simulator(served: Served):
    url = await simulator(served, step_base_ms=STEP_MS, prefill_tokens_per_s=1e9)
    figures = await only(url, concurrency="1", requests=2, output="8")
    assert (figures.requests.good, figures.requests.failed) == (2, 0)
    assert figures.ttft_ms is not None
    assert figures.tpot_ms is not None
    assert figures.e2e_ms is not None
    assert figures.ttft_ms.p50 == pytest.approx(STEP_MS, rel=0.5)
    assert figures.tpot_ms.p50 == pytest.approx(STEP_MS, rel=0.2)
    assert figures.e2e_ms.p50 == pytest.approx(8 * STEP_MS, rel=0.2)
    assert figures.output_tokens_per_s == pytest.approx(1e3 / STEP_MS, rel=0.2)


async def test_lengths_are_those_that_were_asked(served: Served):
    figures = await only(await simulator(served), input="100", output="7", requests=6)
    assert figures.prompt_tokens is not None
    assert figures.completion_tokens is not None
    assert (figures.prompt_tokens.mean, figures.prompt_tokens.max) == (100, 100)
    assert (figures.completion_tokens.count, figures.completion_tokens.max) == (6, 7)
    assert figures.tokens_counted_by == "usage"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_both_endpoints_are_asked(served: Served, endpoint: str):
    assert (await only(await simulator(served), endpoint=endpoint)).requests.good == 4


async def test_levels_run_one_after_the_other(served: Served):
    result = await measured(await simulator(served), concurrency="1,3", requests=6)
    assert [(figures.load, figures.requests.good) for figures in result.figures] == [
        ("1 stream", 6),
        ("3 streams", 6),
    ]


@pytest.mark.parametrize("concurrency", ["1", "5"])
async def test_workers_share_all_requests(served: Served, concurrency: str):
    """Also where there are fewer users than workers, or not as many for each."""
    words: dict[str, Any] = {"workers": 3, "concurrency": concurrency, "requests": 11}
    (figures,) = (await measured_by_processes(await simulator(served), **words)).figures
    assert figures.requests.good == 11


async def test_conversations_grow_with_their_turns(served: Served):
    url = await simulator(served)
    result = await measured_by_processes(
        url, turns=3, conversations=4, requests=None, shared_prefix=50, workers=2
    )
    ((figures, seen),) = result.levels
    assert figures.requests.good == 12
    by_turn = [[o.prompt_tokens or 0 for o in seen.outcomes if o.turn == turn] for turn in range(3)]
    assert [len(tokens) for tokens in by_turn] == [4, 4, 4]
    assert min(by_turn[0]) >= 60
    assert max(by_turn[0]) < min(by_turn[1])
    assert max(by_turn[1]) < min(by_turn[2])


async def test_open_load_does_not_wait_for_answers(served: Served):
    """Ten requests a second at a service that takes 0.4 s for each: one user would send two or three."""
    url = await simulator(served, step_base_ms=100)
    figures = await only(url, concurrency=None, rate="10", steady=True, requests=None, seconds=1.0)
    assert (figures.requests.good, figures.requests.failed) == (10, 0)


async def test_waiting_for_a_full_service_is_the_users_waiting(served: Served):
    """One request at a time, 0.2 s each, asked ten times at once: the median waits for four before it."""
    url = await simulator(served, step_base_ms=50, prefill_tokens_per_s=1e9, max_num_seqs=1)
    figures = await only(url, concurrency=None, rate="1000", steady=True, requests=10)
    assert figures.e2e_ms is not None
    assert figures.e2e_ms.p50 == pytest.approx(1100, rel=0.3)


async def test_trace_gives_times_and_lengths(served: Served, tmp_path: Path):
    rows = [{"timestamp": i / 10, "input_length": 20 + i, "output_length": 2 + i} for i in range(5)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    words: dict[str, Any] = {"concurrency": None, "requests": None, "input": None, "output": None}
    result = await measured_by_processes(await simulator(served), trace=trace, workers=2, **words)
    ((figures, seen),) = result.levels
    outcomes = sorted(seen.outcomes, key=lambda outcome: outcome.due)
    assert figures.requests.good == 5
    assert [outcome.completion_tokens for outcome in outcomes] == [2, 3, 4, 5, 6]
    assert outcomes[-1].due - outcomes[0].due == pytest.approx(0.4, abs=1e-6)


async def test_own_prompts_are_asked_as_they_are(served: Served, tmp_path: Path):
    url = await simulator(served, replies={"one": "first answer"})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "one"}]}\n')
    ((_, seen),) = (await measured(url, prompts=prompts, input=None, output=None)).levels
    assert {outcome.completion_tokens for outcome in seen.outcomes} == {5}  # four pieces and the end


async def test_answer_that_breaks_off_is_a_failure_with_a_name(served: Served):
    """The trial requests have no more tokens than the simulator makes."""
    figures = await only(await simulator(served, fail_after_tokens=5), output="9")
    assert failures(figures) == {("error event", True): 4}
    assert figures.output_tokens_per_s == 0


async def test_missing_key_is_told_before_any_load(served: Served):
    await served.gateway("m", api_key="secret")
    await served.replica()
    with pytest.raises(Unauthorized, match="PENSTOCK_API_KEY"):
        await measured(served.url)
    assert (await only(served.url, api_key="secret")).requests.good == 4


async def test_unknown_model_is_told_before_any_load(served: Served):
    with pytest.raises(ModelNotFound, match="other"):
        await measured(await simulator(served), model="other")


async def test_too_long_requests_are_told_before_any_load(served: Served):
    with pytest.raises(ConfigError, match="room for 64"):
        await measured(await simulator(served, max_model_len=64), input="60", output="60")


async def test_silent_address_is_told_before_any_load(free_port: int):
    with pytest.raises(Unavailable, match=f"Nothing answers at http://127.0.0.1:{free_port}"):
        await measured(f"127.0.0.1:{free_port}")


# -- against services that misbehave


def cut(number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(_stream(TOKEN))
    writer.close()


def hang_up(number: int, writer: asyncio.StreamWriter) -> None:
    writer.close()


def refuse(number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(_sized(429, b'{"error":{"message":"Slow down."}}'))


def garble(number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(b"what?\r\n\r\n")


def say_nothing(number: int, writer: asyncio.StreamWriter) -> None:
    pass


def begin_and_stall(number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(_stream(TOKEN))


@pytest.mark.parametrize(
    ("answer", "kind", "begun"),
    [
        (cut, "cut", True),
        (hang_up, "no answer", False),
        (refuse, "status 429", False),
        (garble, "not HTTP", False),
        (say_nothing, "timeout", False),
        (begin_and_stall, "timeout", True),
        (lambda *_: TOKEN + DONE, "no finish reason", True),
        (lambda *_: TOKEN + LAST, "no [DONE]", True),
        (lambda *_: LAST + DONE, "no text", False),
        (lambda *_: TOKEN + b'data: {"error":{"message":"dead"}}\n\n', "error event", True),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
async def test_bad_answers_are_failures_with_a_name(answer: Callable[..., Any], kind: str, begun: bool):
    """The time limit holds for the trial request, too, which a busy machine must answer within it."""
    async with service(answer) as url:
        figures = await only(url, timeout=3, requests=2)
    assert failures(figures) == {(kind, begun): 2}


async def test_service_that_vanishes_refuses(served: Served):
    url = await simulator(served)
    loop, begun = asyncio.get_running_loop(), asyncio.Event()

    class Seen(Watcher):
        def look(self, measured: Measured) -> None:
            if measured.outcomes:
                loop.call_soon_threadsafe(begun.set)

    words = BenchOptions(url, concurrency="1", seconds=1.0, warmup=0.0, input="16", output="4")
    running = asyncio.create_task(asyncio.to_thread(run, BenchSettings.of(words), Seen()))
    await begun.wait()
    await served.port.close(grace_s=0.0)
    (figures,) = (await running).figures
    assert figures.requests.good > 0
    assert ("refused", False) in failures(figures)


async def test_good_and_bad_answers_are_told_apart():
    async with service(lambda number, writer: GOOD if number % 2 else TOKEN) as url:
        figures = await only(url, requests=6, concurrency="1")
    assert (figures.requests.good, failures(figures)) == (3, {("no [DONE]", True): 3})


async def test_kept_connection_that_the_service_ended_is_no_failure():
    def answer(number: int, writer: asyncio.StreamWriter) -> bytes:
        asyncio.get_running_loop().call_later(0.05, writer.close)  # without a word, while it is idle
        return GOOD

    async with service(answer) as url:
        figures = await only(url, turns=2, conversations=3, requests=None, think=0.2, concurrency="1")
    assert (figures.requests.good, figures.requests.failed) == (6, 0)


async def test_reports_of_very_many_events_reach_the_parent():
    """Half a megabyte of times in one report: more than a pipe holds."""
    async with service(lambda *_: TOKEN * 60_000 + LAST + DONE) as url:
        (figures,) = (await measured_by_processes(url, requests=2, concurrency="1")).figures
    assert figures.completion_tokens is not None
    assert (figures.requests.good, figures.completion_tokens.mean) == (2, 60_000)


async def test_merged_tokens_are_told():
    async with service(lambda *_: TOKEN * 2 + LAST + USAGE % (9, 20) + DONE) as url:
        figures = await only(url)
    assert figures.tokens_per_event == pytest.approx(10)


async def test_service_without_usage_is_measured_by_events():
    async with service(lambda *_: TOKEN * 3 + LAST + DONE) as url:
        result = await measured(url)
    assert result.figures[0].tokens_counted_by == "events"
    assert result.figures[0].completion_tokens is not None
    assert result.figures[0].completion_tokens.max == 3


async def test_fields_that_a_service_refuses_are_left_out(served: Served):
    """Knows neither ignore_eos nor max_tokens, as some hosted models do not."""

    async def strict(scope: Scope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"])
        unknown = {"ignore_eos", "max_tokens"} & set(body)
        status, kind = (400, b"application/json") if unknown else (200, b"text/event-stream")
        said = json.dumps({"error": {"message": f"Unknown: {unknown}"}}).encode() if unknown else GOOD
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": said})

    await served.gateway("m")
    await served.app(strict)
    result = await measured(served.url, input="2", output="2")
    assert result.figures[0].requests.good == 4
    assert any("ignore_eos" in note for note in result.notes)


async def test_error_of_the_trial_request_is_the_services_own():
    def broken(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(_sized(500, b'{"error": {"message": "No GPU left."}}'))

    async with service(broken, trials=0) as url:
        with pytest.raises(Error, match=r"status 500: No GPU left\."):
            await measured(url)


async def test_service_that_hangs_is_told_before_any_load():
    async with service(say_nothing, trials=0) as url:
        with pytest.raises(Unavailable, match=r"within 0\.5 s"):
            await measured(url, timeout=0.5)


async def test_https_is_spoken_and_certificates_are_checked(tmp_path: Path):
    context = _certificate(tmp_path)
    async with service(lambda *_: GOOD, tls=context) as url:
        with pytest.raises(Unavailable, match="TLS"):
            await measured(url)
        assert (await only(url, insecure=True)).requests.good == 4


def _certificate(folder: Path) -> ssl.SSLContext:
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = (
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=test -keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


# -- the command


async def test_command_writes_table_json_page_and_records(
    served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = BenchOptions(
        await simulator(served), requests=4, concurrency="1,2", warmup=0.0, input="16", output="4"
    )
    files = Files(tmp_path / "b.json", tmp_path / "b.html", tmp_path / "b.jsonl")
    assert await asyncio.to_thread(measure, words, files) == 0
    out = capsys.readouterr().out
    assert "TTFT ms" in out
    assert "2 streams" in out
    record = json.loads((tmp_path / "b.json").read_text())
    assert [level["requests"]["good"] for level in record["levels"]] == [4, 4]
    assert record["levels"][0]["ttft_ms"]["p50"] > 0
    assert len((tmp_path / "b.jsonl").read_text().splitlines()) == 8
    page = (tmp_path / "b.html").read_text()
    assert "2 streams" in page
    assert "%%" not in page
    assert "src=" not in page
    assert "<link" not in page


async def test_exit_code_is_1_when_all_failed_or_errors_count(tmp_path: Path):
    async def code(answer: Callable[..., Any], **more: bool) -> int:
        async with service(answer) as url:
            words = BenchOptions(url, requests=2, concurrency="1", warmup=0.0)
            return await asyncio.to_thread(measure, words, Files(), **more)

    assert await code(refuse) == 1
    assert await code(lambda number, writer: GOOD if number else TOKEN) == 0
    assert await code(lambda number, writer: GOOD if number else TOKEN, fail_on_errors=True) == 1


async def test_ctrl_c_ends_with_the_report_so_far(served: Served, tmp_path: Path):
    await served.gateway("m")
    replica = await served.replica(step_base_ms=20)
    command = [sys.executable, "-m", "penstock.cli", "bench", served.url, "--warmup", "0", "--output", "10"]
    report = tmp_path / "report.json"
    command += ["--json", str(report)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    await until(lambda: replica.engine.counts().finished > 50)
    process.send_signal(signal.SIGINT)
    out, _ = await process.communicate()
    assert process.returncode == 130
    assert b"stopped early" in out
    (level,) = json.loads(report.read_text())["levels"]
    assert level["stopped_early"]
    assert level["requests"]["good"] > 20
    assert level["requests"]["failed"] == 0
    await until(lambda: replica.engine.load().running == 0)
