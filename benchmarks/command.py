"""What the commands of this package share: options, signals, and a look at the machine before they begin."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from benchmarks import processes
from benchmarks.load import generator


def say(text: str) -> None:
    """Progress, which is not part of the result."""
    print(text, file=sys.stderr, flush=True)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options of every command."""
    add = parser.add_argument
    add("--tokens", type=int, default=64, help="tokens of each answer")
    add("--model", type=Path, default=demo_model(), help="model folder (default: the embedded demo model)")
    add("--json", type=Path, default=None, metavar="FILE", help="write everything to this file")
    add("--shared", action="store_true", help="run though other Ray or vLLM processes are there")


def choices(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Parser of "a,b" where each must be known."""

    def parse(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is not one of {', '.join(known)}")
        return found

    return parse


def numbers(text: str) -> list[int]:
    """Parser of "1,16,64"."""
    return [int(number) for number in text.split(",")]


@contextmanager
def cleaned_up() -> Generator[None]:
    """Whatever ends the block, a signal too, no process that it started is left."""
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for signum in stops:
        signal.signal(signum, _interrupt)
    processes.adopt_orphans()
    generator()  # compile it before anything is measured
    try:
        yield
    except KeyboardInterrupt:
        say("Interrupted: what was measured so far follows.")
    finally:
        for signum in stops:
            signal.signal(signum, signal.SIG_IGN)
        processes.end_all()


_AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


def refuse_strangers(shared: bool) -> None:
    """Raises: SystemExit when Ray or vLLM runs here already, unless the machine is said to be shared."""
    if _AUTOGROUP.exists() and _AUTOGROUP.read_text().strip() == "1":
        say(
            "The kernel shares CPUs among sessions (autogroup), which may stop a client or a server for a "
            "second. For tails that are a server's own: sysctl kernel.sched_autogroup_enabled=0"
        )
    found = processes.strangers()
    if found and not shared:
        listed = "\n  ".join(found)
        raise SystemExit(
            "Ray or vLLM runs on this machine already, which would spoil the figures. End it, or measure all "
            f"the same with --shared:\n  {listed}"
        )


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def demo_model() -> Path:
    """Folder of the embedded model."""
    import penstock

    return Path(penstock.demo_model())
