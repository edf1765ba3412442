"""The guard of `penstock serve`, with work that behaves badly instead of Ray."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

Guarded = Callable[[str], subprocess.Popen[str]]

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(99)
"""
ORPHAN_MAKER = f"""
import subprocess, sys
left = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE)
left.stdout.readline()  # "up": it ignores SIGTERM by now
print(left.pid, flush=True)
"""


@pytest.fixture
def guarded(tmp_path: Path):
    """Starts `work()`, given as source, under the guard; kills what a failing test leaves."""
    started: list[subprocess.Popen[str]] = []

    def start(work: str, stop_s: float = 20) -> subprocess.Popen[str]:
        program = tmp_path / "program.py"
        program.write_text(
            "import os, signal, subprocess, sys, time\n"
            "for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
            "    signal.signal(signum, signal.SIG_DFL)  # nohup, and a background job, ignore some\n"
            "from penstock.cli.process.guard import guarded\n"
            f"STUBBORN, ORPHAN_MAKER = {STUBBORN!r}, {ORPHAN_MAKER!r}\n"
            f"{textwrap.dedent(work)}\n"
            f"sys.exit(guarded(work, stop_s={stop_s}))\n"
        )
        process = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        for left in [*descendants(process), *([process] if process.poll() is None else [])]:
            left.kill()


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip() for _ in range(count)]


def wait_gone(processes: list[psutil.Process]) -> list[psutil.Process]:
    return psutil.wait_procs(processes, timeout=20)[1]


def test_exit_code_of_the_work_is_the_exit_code(guarded: Guarded):
    assert guarded("def work(told): return 7").wait(20) == 7


def test_exception_in_the_work_is_exit_code_1(guarded: Guarded):
    assert guarded("def work(told): raise RuntimeError('x')").wait(20) == 1


def test_killed_work_is_reported_as_a_shell_would(guarded: Guarded):
    assert guarded("def work(told): os.kill(os.getpid(), signal.SIGKILL)").wait(20) == 128 + 9


NO_MORE = """
    import errno
    def work(told): return 0
    def fork(): raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    os.fork = fork
    try:
        guarded(work, stop_s=20)
    except Exception as error:
        print(error, flush=True)
    time.sleep(99)
"""


def test_ctrl_c_still_ends_a_command_that_could_not_start_its_work(guarded: Guarded):
    process = guarded(NO_MORE)
    assert "raise the limit: ulimit -u" in lines(process, 1)[0]
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == -signal.SIGINT


LEAVES = {
    "a child": """
        def work(told):
            command = [sys.executable, "-c", STUBBORN]
            left = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
            left.stdout.readline()  # "up": it ignores SIGTERM by now
            print(left.pid, flush=True)
            return 0
    """,
    "a grandchild that lost its parent": """
        def work(told):
            subprocess.run([sys.executable, "-c", ORPHAN_MAKER], start_new_session=True)
            return 0
    """,
}


@pytest.mark.parametrize("work", LEAVES.values(), ids=LEAVES)
def test_what_the_work_leaves_behind_is_ended(guarded: Guarded, work: str):
    process = guarded(work)
    left = psutil.Process(int(lines(process, 1)[0]))
    assert process.wait(20) == 0
    assert wait_gone([left]) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_reaches_the_work_once(guarded: Guarded, signum: int):
    process = guarded(
        """
        def work(told):
            print("up", flush=True)
            first = os.read(told, 1)
            os.set_blocking(told, False)
            time.sleep(0.3)
            try:
                return 99 if os.read(told, 1) else 98
            except BlockingIOError:
                return first[0]
        """
    )
    lines(process, 1)
    os.kill(process.pid, signum)
    assert process.wait(20) == signum


def test_work_that_ignores_the_signal_is_killed_after_its_time(guarded: Callable[..., subprocess.Popen[str]]):
    process = guarded("def work(told): exec(STUBBORN)", stop_s=0.5)
    lines(process, 1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + 9


def test_work_is_told_when_its_guard_is_killed(guarded: Guarded):
    process = guarded(
        """
        def work(told):
            print("up", flush=True)
            assert os.read(told, 1) == b""
            print("stopped", flush=True)
            return 0
        """
    )
    lines(process, 1)
    left = descendants(process)
    process.kill()
    assert lines(process, 1) == ["stopped"]
    assert wait_gone(left) == []


def test_a_fault_is_told_where_users_read_though_output_went_to_a_log(
    guarded: Guarded, capfd: pytest.CaptureFixture[str]
):
    process = guarded("""
        def work(signals_fd):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            raise OSError("too long")
    """)
    assert process.wait(30) == 1
    assert "A fault of Penstock itself (OSError: too long)" in capfd.readouterr().err


def test_a_full_disk_ends_penstock_serve_with_a_sentence(free_port: int):
    program = """
        import errno, os, pathlib, sys
        def full(*_, **__):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        pathlib.Path.write_text = full
        from penstock.cli import main
        main()
    """
    words = ["serve", "--engine", "sim", "--port", str(free_port)]
    run = [sys.executable, "-c", textwrap.dedent(program), *words]
    ended = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert re.fullmatch(
        r"penstock serve: '/.*' cannot be written: No space left on device. Set TMPDIR.\n", ended.stderr
    )


def test_output_that_finds_a_full_disk_ends_with_a_sentence():
    run = [sys.executable, "-m", "penstock.cli", "schema"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("penstock: The output cannot be written: No space left on device.\n")
    assert "fault of Penstock" not in ended.stderr
