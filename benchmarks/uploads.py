"""Uploads of 25 MiB, as audio comes: what the gateway adds to one, and what it does with 64 at once.

    python -m benchmarks.uploads [--count 40]

Replica and gateway run in processes of their own, without Ray; the replica reads its body and answers at once
(see `plain`). One client asks it straight and through the gateway in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.command import cleaned_up, say
from benchmarks.fleet import Gateway, Replica
from benchmarks.table import markdown
from benchmarks.workload import MODEL_ID

_MIB = 2**20
_SIZE = 25 * _MIB
_AT_ONCE = 64
_ROOM = 400 * _MIB
_BOUNDARY = "a-line-that-is-not-in-the-sound"
_ALLOWED_S = 120


def upload(headers: Sequence[str]) -> bytes:
    """A whole request. `model` stands last, as OpenAI's client sends it."""
    part = f"--{_BOUNDARY}\r\nContent-Disposition: form-data; name="
    body = b"".join(
        [
            f'{part}"file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'.encode(),
            bytes(range(256)) * (_SIZE // 256),
            f'\r\n{part}"model"\r\n\r\n{MODEL_ID}\r\n--{_BOUNDARY}--\r\n'.encode(),
        ]
    )
    head = [
        "POST /v1/audio/transcriptions HTTP/1.1",
        "host: bench",
        "connection: close",
        f"content-type: multipart/form-data; boundary={_BOUNDARY}",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


def ask(port: int, request: bytes) -> tuple[str, float]:
    """Status, "lost" where there was no answer, and seconds from connecting to the answer's end."""
    began = time.perf_counter()
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=_ALLOWED_S) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent
            connection.sendall(request)
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                answer += piece
    status = answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "lost"
    return status, time.perf_counter() - began


def one_by_one(count: int) -> list[list[str]]:
    """Rows: straight and through the gateway, in turns."""
    with Replica("plain") as replica, Gateway(replica) as gateway:
        targets = {
            "straight to the replica": (replica, upload(replica.headers)),
            "through the gateway": (gateway, upload(gateway.headers)),
        }
        taken: dict[str, list[float]] = {name: [] for name in targets}
        before = gateway.spent()
        for turn in range(count + 3):
            for name, (target, request) in targets.items():
                status, seconds = ask(target.port, request)
                if status != "200":
                    raise RuntimeError(f"An upload {name} was answered with {status}.")
                if turn >= 3:
                    taken[name].append(1e3 * seconds)
        grown = (gateway.spent().most_memory - before.memory) / _MIB
    rows = [
        [name, f"{statistics.median(times):.1f}", f"{statistics.quantiles(times, n=10)[-1]:.1f}"]
        for name, times in taken.items()
    ]
    return [[*rows[0], ""], [*rows[1], f"{grown:.0f}"]]


def all_at_once(**config: int) -> list[str]:
    """A row: what became of the uploads, the gateway's memory at most, and whether it still answers."""
    with Replica("plain") as replica, Gateway(replica, **config) as gateway:
        request, before = upload(gateway.headers), gateway.spent().memory
        began = time.perf_counter()
        with ThreadPoolExecutor(_AT_ONCE) as clients:
            answers = Counter(
                status for status, _ in clients.map(lambda _: ask(gateway.port, request), range(_AT_ONCE))
            )
        seconds = time.perf_counter() - began
        grown = (gateway.spent().most_memory - before) / _MIB
        after, _ = ask(gateway.port, request)
    others = sum(answers.values()) - answers["200"] - answers["429"] - answers["lost"]
    counts = [str(answers[status]) for status in ("200", "429", "lost")]
    return [*counts, str(others), f"{seconds:.1f}", f"{grown:.0f}", after]


def main(words: Sequence[str] | None = None) -> int:
    """Prints what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.uploads")
    parser.add_argument("--count", type=int, default=40, help="uploads one by one, each way")
    options = parser.parse_args(words)
    with cleaned_up():
        say("one by one")
        alone = one_by_one(options.count)
        say(f"{_AT_ONCE} at once")
        together = [
            ["1 GiB (the default)", *all_at_once()],
            ["400 MiB", *all_at_once(max_bodies_bytes=_ROOM)],
        ]
    print(markdown(["one at a time", "p50 ms", "p90 ms", "gateway's memory, MiB more"], alone), end="\n\n")
    head = [
        "max_bodies_bytes",
        "200",
        "429",
        "lost",
        "others",
        "seconds",
        "MiB more at most",
        "one more, after",
    ]
    print(markdown(head, together))
    return 0


if __name__ == "__main__":
    sys.exit(main())
