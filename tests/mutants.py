"""Changes one expression or statement at a time, and says which changes no test notices.

    make mutants                                   # 40 changes of each file, chosen by a fixed seed
    make mutants ARGS="serve/gateway/auth.py"      # all changes of one
    make mutants ARGS="serve/gateway/auth.py:57"   # those of one line

Works in copies of src/. A file's tests are those that claim it: each change runs them until one fails. Prints
the share that was noticed in each file; it is an error where that is under `WANTED`.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
WANTED = 0.9

TESTS = {
    "serve/gateway/admission.py": "unit/test_admission unit/test_interleaved http/test_admission"
    " http/test_interleaved_gateway http/test_service_tier http/test_batch_turns http/test_gateway_stops"
    " http/test_replica_faults",
    "serve/gateway/auth.py": "http/test_auth http/test_admin http/test_web_pages http/test_batches_api",
    "serve/gateway/dispatch.py": "http/test_interleaved_gateway http/test_failover http/test_fallbacks"
    " http/test_streams_cut http/test_replica_faults http/test_flow",
    "serve/fleet/table.py": "unit/test_table unit/test_routing_policies",
    "serve/routing/simple.py": "unit/test_routing_policies unit/test_table unit/test_routing_adapters",
    "serve/routing/prefix_affinity.py": "unit/test_routing_policies unit/test_routing_adapters"
    " unit/test_routing_memory",
    "serve/replica/frontend/listener.py": "http/test_link http/test_rows http/test_auth"
    " http/test_replica_faults",
    "serve/http/connection_limits.py": "unit/test_connection_limits http/test_port_limits"
    " http/test_work_in_turns",
    "data/journal/segment.py": "unit/test_data_journal",
    "data/journal/lock.py": "unit/test_journal_lock unit/test_data_journal",
    "data/execution/window.py": "unit/test_data_window",
    "data/execution/retry.py": "unit/test_data_retry unit/test_data_window",
}
"""What decides most, below src/penstock, and the tests that claim it."""

UNNOTICED = {
    "serve/gateway/admission.py": {
        "offer: break": {"continue": "where a higher class cannot go to a replica, no lower one can"},
    },
    "serve/routing/simple.py": {
        "pick: return Pick(second if second.busy < first.busy else first)": {
            "second.busy <= first.busy": "of two that are alike",
        },
        "pick: if asked.session and len(candidates) > 1:": {
            "len(candidates) >= 1": "the only one is picked either way",
        },
        "__init__: self._turn = 0": {"1": "where turns begin"},
    },
    "serve/routing/prefix_affinity.py": {
        "pick: if cost < least and replica.busy + 1 <= most:": {"cost <= least": "of two that are alike"},
        "_worth_a_copy: return False": {"return None": "both are false"},
    },
    "data/execution/window.py": {
        "__init__: self._restarted_at = 0.0": {"1.0": "before every clock"},
        "__init__: self._answered_at = 0.0": {"1.0": "before every clock"},
        "_on_unreachable: if now - self._outage_since > self.retry_policy.outage_s:": {
            "now - self._outage_since >= self.retry_policy.outage_s": "the same but for one moment",
        },
        "_busy_too_long: if now - self._outage_since > self.retry_policy.outage_s:": {
            "now - self._outage_since >= self.retry_policy.outage_s": "the same but for one moment",
        },
        "_busy_too_long: return now - row.busy_since > self.retry_policy.outage_s": {
            "now - row.busy_since >= self.retry_policy.outage_s": "the same but for one moment",
        },
        "_may_refuse_all: are_new = all(one.started > since for one in self._in_flight)": {
            "one.started >= since": "the same but for one moment",
        },
        "_may_refuse_all: return may_be_answered and (last is None or last > self._answered_at)": {
            "last >= self._answered_at": "the same but for one moment",
        },
        "_may_refuse_all: return False": {"return None": "both are false"},
        "start_try: return False": {"return None": "both are false"},
    },
    "data/execution/retry.py": {
        "is_lasting: return status < 500 and status not in RETRYABLE_STATUSES | REFUSED_STATUSES": {
            "status <= 500": "500 may end otherwise, so it never lasts",
            "501": "as above",
        },
        '_envelope: known = len(body) <= _MOST_ERROR and isinstance(_error(body).get("type"), str)': {
            "len(body) < _MOST_ERROR": "of 65,536 bytes one more",
        },
    },
    "data/journal/segment.py": {
        "__init__: self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)": {
            "421": "nobody runs a journal",
        },
        "encode_entry: compact = msgspec.json.format(bytes(outcome.body), indent=-1)": {
            "2": "any indent below 0 is one line",
        },
        "_put: self._lines, self._callbacks, self._bytes = [], [], 0": {"1": "a byte of 16 MiB"},
        "append: if self._bytes > _MOST_PENDING_BYTES:": {
            "self._bytes >= _MOST_PENDING_BYTES": "a byte of 16 MiB"
        },
        '_write: if not error.facts.get("retryable") or time.monotonic() - began > _OUTAGE_S:': {
            "time.monotonic() - began >= _OUTAGE_S": "a moment of 300",
        },
    },
    "data/journal/lock.py": {
        "_live_claim: time.sleep(HEARTBEAT_S / 4)": {
            "HEARTBEAT_S * 4": "how often a successor looks, not for how long",
            "pass": "the same",
            "5": "the same",
        },
        "_live_claim: while before is not None and time.monotonic() < deadline:": {
            "time.monotonic() <= deadline": "the same but for one moment",
        },
        "__init__: self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)": {"421": "nobody runs a lock"},
        "_lock: raise _locked_by(path.parent.as_posix(), _decoded(os.read(self._file, 4096)))": {
            "4097": "more than a note is long",
        },
        "_next_term: return max(time.time_ns() // 1_000_000, int(highest, 16) + 1)": {
            "1000001": "the term of a clock, which only has to grow",
        },
        "release: if self._file >= 0:": {"self._file > 0": "0 is the standard input"},
    },
}
"""Changes that nobody can see: by function and line, what stands in the line instead, and why."""

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.Break: ast.Continue, ast.Continue: ast.Break,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    text: str
    """Of the whole file, changed."""
    source: str
    """The function, and the line of it that changes."""
    was: str
    new: str

    @property
    def is_excused(self) -> bool:
        return self.new in UNNOTICED.get(self.file, {}).get(self.source, {})


def changed(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in place of a node."""
    match node:
        case ast.Compare(ops=[operator]):
            yield _with(node, ops=[SWAPPED[type(operator)]()])
        case ast.BoolOp(op=operator) | ast.BinOp(op=operator) if type(operator) in SWAPPED:
            yield _with(node, op=SWAPPED[type(operator)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.IfExp(body=body, orelse=orelse):
            yield _with(node, body=orelse, orelse=body)
        case ast.Break() | ast.Continue():
            yield SWAPPED[type(node)]()
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case ast.Raise():
            yield ast.Pass()


def _with(node: ast.AST, **fields: object) -> ast.AST:
    other = copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _logs(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node).startswith("log.")


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Of what runs in a function: no annotations, no defaults of a module, no lines of a log."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.arguments | ast.JoinedStr) or _logs(child):
            continue
        if isinstance(child, ast.AnnAssign):
            if child.value is not None:
                yield from _nodes(ast.Expr(child.value))
            continue
        yield child
        yield from _nodes(child)


def mutants(file: str) -> list[Mutant]:
    text = (ROOT / "src/penstock" / file).read_text()
    lines = text.encode().splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    found: list[Mutant] = []
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in (node for part in function.body for node in (part, *_nodes(part))):
            if not isinstance(node, ast.expr | ast.stmt) or _logs(node):
                continue
            begin = starts[node.lineno - 1] + node.col_offset
            end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            for other in changed(node):
                new = ast.unparse(ast.fix_missing_locations(other))
                whole = text.encode()
                put = f"({new})" if isinstance(node, ast.expr) else new
                mutated = (whole[:begin] + put.encode() + whole[end:]).decode()
                source = b"".join(lines[node.lineno - 1 : node.end_lineno])
                source, was = (" ".join(part.decode().split()) for part in (source, whole[begin:end]))
                found.append(Mutant(file, node.lineno, mutated, f"{function.name}: {source}", was, new))
    excuses = {(line, new) for line, changes in UNNOTICED.get(file, {}).items() for new in changes}
    if unknown := excuses - {(mutant.source, mutant.new) for mutant in found}:
        raise SystemExit(f"{file}: UNNOTICED names changes that there are not: {unknown}")
    return list({mutant.text: mutant for mutant in found}.values())


class Copies:
    """Copies of src/, one for each mutant that is tried at the same time."""

    def __init__(self, number: int, folder: Path) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for index in range(number):
            shutil.copytree(ROOT / "src", folder / str(index))
            self._free.put(folder / str(index))

    def is_noticed(self, mutant: Mutant | None, tests: list[str], limit_s: float | None) -> bool:
        """Whether a test fails with the change; with None, without any."""
        source = self._free.get()
        try:
            if mutant is not None:
                (source / "penstock" / mutant.file).write_text(mutant.text)
            return _fails(source, tests, limit_s)
        finally:
            if mutant is not None:
                shutil.copy(ROOT / "src/penstock" / mutant.file, source / "penstock" / mutant.file)
            self._free.put(source)


def _fails(source: Path, tests: list[str], limit_s: float | None) -> bool:
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "--timeout", "60", *tests]
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    running = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return running.wait(limit_s) != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        if running.poll() is None:
            os.killpg(running.pid, 9)
            running.wait()


def tried(file: str, chosen: list[Mutant], copies: Copies, pool: Executor) -> float:
    """Prints what no test notices, and returns the share that one does."""
    tests = [f"tests/{test}.py" for test in TESTS[file].split()]
    began = time.monotonic()
    if copies.is_noticed(None, tests, None):
        raise SystemExit(f"{file}: its tests fail as it is")
    limit_s = 30 + 4 * (time.monotonic() - began)
    chosen = [mutant for mutant in chosen if not mutant.is_excused]
    noticed = 0
    for mutant, is_noticed in zip(
        chosen, pool.map(lambda mutant: copies.is_noticed(mutant, tests, limit_s), chosen), strict=True
    ):
        noticed += is_noticed
        if not is_noticed:
            print(f"  {file}:{mutant.line}: {mutant.was} -> {mutant.new}", flush=True)
    share = noticed / max(1, len(chosen))
    print(f"{file}: {noticed} of {len(chosen)} noticed, {share:.0%}", flush=True)
    return share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE[:LINE]", help="all changes of these")
    parser.add_argument("--most", type=int, default=40, help="changes of a file, where none is named")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        copies = Copies(given.jobs, Path(folder))
        for name in given.files or TESTS:
            file, _, line = name.partition(":")
            possible = [mutant for mutant in mutants(file) if not line or mutant.line == int(line)]
            if not given.files and len(possible) > given.most:
                possible = random.Random(given.seed).sample(possible, given.most)
            shares.append(tried(file, sorted(possible, key=lambda mutant: mutant.line), copies, pool))
    return int(min(shares) < WANTED)


if __name__ == "__main__":
    sys.exit(main())
