"""Changes one expression or statement at a time, and says which changes no test notices.

    make mutants                                   # all changes of the files in `TESTS`
    make mutants ARGS="--most 40"                  # 40 of each, chosen by a fixed seed
    make mutants ARGS="serve/gateway/auth.py"      # those of one file
    make mutants ARGS="serve/gateway/auth.py:57"   # those of one line

A file's tests are those that claim it. Prints the share that was noticed in each file; it is an error where
that is under `WANTED`. `tests/unnoticed.txt` lists the changes that nobody can see.
"""

from __future__ import annotations

import argparse
import ast
import faulthandler
import gc
import importlib
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import TextIO

import pytest
from coverage import Coverage

ROOT = Path(__file__).parents[1]
WANTED = 0.9
BROKEN = 2
NOTHING = os.open(os.devnull, os.O_WRONLY)

Costs = dict[str, tuple[float, float]]
"""Seconds of a CPU, and by the clock, of each test."""

Line = tuple[str, int]

TESTS = {
    "serve/gateway/admission.py": "unit/test_admission unit/test_interleaved http/test_admission",
    "serve/gateway/auth.py": "unit/test_auth",
    "serve/gateway/dispatch.py": "unit/test_dispatch http/test_failover http/test_fallbacks",
    "serve/fleet/table.py": "unit/test_table unit/test_routing_policies",
    "serve/routing/simple.py": "unit/test_routing_policies unit/test_table unit/test_routing_adapters",
    "serve/routing/prefix_affinity.py": "unit/test_routing_policies unit/test_routing_adapters"
    " unit/test_routing_memory",
    "serve/replica/inbound/listener.py": "unit/test_listener http/test_rows http/test_idle"
    " http/test_multiplexer",
    "serve/http/connection_limits.py": "unit/test_connection_limits http/test_port_limits"
    " http/test_work_in_turns",
    "data/journal/segment.py": "unit/test_data_journal",
    "data/journal/lock.py": "unit/test_journal_lock unit/test_data_journal",
    "data/execution/window.py": "unit/test_data_window",
    "data/execution/retry.py": "unit/test_data_retry unit/test_data_window",
}
"""What decides most, below src/penstock, and the tests that claim it."""

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
    lines: range
    """Of the changed statement, up to the change."""
    text: str
    """Of the whole file, changed."""
    was: str
    place: tuple[str, str, str]
    """As in `tests/unnoticed.txt`: the function, the lines that change, what stands there instead."""


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
    """All changes of a file below src/penstock, in the order of its lines."""
    text = (ROOT / "src/penstock" / file).read_bytes()
    lines = text.splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
    found: dict[bytes, Mutant] = {}
    places: Counter[tuple[str, str, str]] = Counter()
    for name, function in _functions(ast.parse(text)):
        statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
        first = {node: statement.lineno for statement in statements for node in ast.walk(statement)}
        for node in (node for part in function.body for node in (part, *_nodes(part))):
            if not isinstance(node, ast.expr | ast.stmt) or _logs(node):
                continue
            last = node.end_lineno or node.lineno
            begin, end = (
                starts[node.lineno - 1] + node.col_offset,
                starts[last - 1] + (node.end_col_offset or 0),
            )
            for other in changed(node):
                new = ast.unparse(ast.fix_missing_locations(other))
                put = f"({new})" if isinstance(node, ast.expr) else new
                mutated = text[:begin] + put.encode() + text[end:]
                source, was = (
                    " ".join(part.decode().split())
                    for part in (b"".join(lines[node.lineno - 1 : last]), text[begin:end])
                )
                places[name, source, new] += 1
                if (number := places[name, source, new]) > 1:
                    new += f" ({number})"
                changed_lines = range(first[node], last + 1)
                found.setdefault(
                    mutated,
                    Mutant(file, node.lineno, changed_lines, mutated.decode(), was, (name, source, new)),
                )
    return sorted(found.values(), key=lambda mutant: mutant.line)


def _functions(
    tree: ast.AST, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The outermost ones, with the names of their classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def excused(file: str) -> set[tuple[str, str, str]]:
    """Changes of a file that nobody can see, as `tests/unnoticed.txt` lists them.

    Raises: SystemExit for one that there is not.
    """
    found: set[tuple[str, str, str]] = set()
    at = name = source = ""
    for line in (ROOT / "tests/unnoticed.txt").read_text().splitlines():
        if not line.startswith("  "):
            at = line
        elif not line.startswith("    "):
            name, _, source = line.strip().partition(": ")
        elif at == file:
            found.add((name, source, line.strip().rpartition("  # ")[0]))
    if unknown := found - {mutant.place for mutant in mutants(file)}:
        raise SystemExit(f"tests/unnoticed.txt names changes of {file} that there are not: {unknown}")
    return found


class Trial:
    """A pytest plugin. For each change it forks this process, which has collected all tests, puts the change
    into the loaded functions, and runs the tests that reach it, the quickest first, until one fails.

    Processes that a test starts import a copy of src/ with the same change.
    """

    def __init__(self, chosen: dict[str, list[Mutant]], jobs: int, show: TextIO) -> None:
        self._chosen, self._jobs, self._show = chosen, jobs, show
        self._switch: Callable[[str], object] = str
        self.shares: list[float] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for file in self._chosen:
            importlib.import_module(f"penstock.{file.removesuffix('.py').replace('/', '.')}")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            costs, reaching = self._measured(session.items, folder)
            items = sorted(
                (item for item in session.items if item.nodeid in costs), key=lambda item: costs[item.nodeid]
            )
            for file, chosen in self._chosen.items():
                for job in range(self._jobs):
                    shutil.copytree(ROOT / "src", folder / str(job), dirs_exist_ok=True)
                known = excused(file)
                trying = [mutant for mutant in chosen if mutant.place not in known]
                works: list[Callable[[int], bool]] = []
                for mutant in trying:
                    names = set[str]().union(*(reaching[file, line] for line in mutant.lines))
                    reached = [
                        item
                        for item in items
                        if item.path in _paths(file) and names & {item.nodeid, item.location[0]}
                    ]
                    works.append(partial(_fails, mutant, folder, reached, costs))
                noticed = 0
                for place, is_noticed in self._each(works):
                    noticed += is_noticed
                    if not is_noticed:
                        mutant = trying[place]
                        where = f"{file}:{mutant.line}: {mutant.place[0]}"
                        print(f"  {where}: {mutant.was} -> {mutant.place[2]}", file=self._show)
                self.shares.append(noticed / max(1, len(trying)))
                drawn = f"{noticed} of {len(trying)} noticed, {self.shares[-1]:.0%}"
                print(f"{file}: {drawn}; {len(chosen) - len(trying)} excused", file=self._show)
        return True

    def _measured(self, items: list[pytest.Item], folder: Path) -> tuple[Costs, defaultdict[Line, set[str]]]:
        """Seconds of each test that passes as it is, and which tests, or files, reach each line."""
        by_file: defaultdict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            by_file[item.location[0]].append(item)
        works = [
            partial(self._measure, ours, folder / f"{place}.notes")
            for place, ours in enumerate(by_file.values())
        ]
        assert not any(fails for _, fails in self._each(works))
        costs: Costs = {}
        reaching: defaultdict[Line, set[str]] = defaultdict(set)
        for notes in folder.iterdir():
            ours, lines = pickle.loads(notes.read_bytes())
            costs |= ours
            for line, tests in lines.items():
                reaching[line].update(tests)
        if failing := {item.nodeid for item in items} - costs.keys():
            print(f"Left out, since they fail as they are: {sorted(failing)}", file=self._show)
        return costs, reaching

    def _each(self, works: Sequence[Callable[[int], bool]]) -> Iterator[tuple[int, bool]]:
        """Does each in a process of its own, which gets the number of its job, and gives what it returned."""
        waiting, free = list(enumerate(works))[::-1], list(range(self._jobs))
        running: dict[int, tuple[int, int]] = {}
        while waiting or running:
            while waiting and free:
                place, work = waiting.pop()
                job = free.pop()
                running[self._fork(partial(work, job))] = place, job
            process, status = os.wait()
            with suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            place, job = running.pop(process)
            free.append(job)
            yield place, os.waitstatus_to_exitcode(status) not in (0, BROKEN)

    def _fork(self, work: Callable[[], bool]) -> int:
        """Id of a process that exits with what this returns, and leads a group."""
        if process := os.fork():
            return process
        status = BROKEN
        try:
            os.setsid()
            status = work()
        except BaseException:
            traceback.print_exc(file=self._show)
        finally:
            os._exit(status)

    def _measure(self, items: list[pytest.Item], notes: Path, _job: int) -> bool:
        """Runs these tests as they are, and writes what `_measured` needs."""
        folder, costs = ROOT / "src/penstock", Costs()
        sources = {str(folder / file): file for file in self._chosen}
        measured = Coverage(data_file=None, include=list(sources), config_file=False)
        measured.start()
        self._switch = measured.switch_context
        for item, after in zip_longest(items, items[1:]):
            began, failed = (time.process_time(), time.monotonic()), item.session.testsfailed
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if item.session.testsfailed == failed:
                costs[item.nodeid] = time.process_time() - began[0], time.monotonic() - began[1]
        measured.stop()
        reaching = {
            (file, line): tests
            for source, file in sources.items()
            for line, tests in measured.get_data().contexts_by_lineno(source).items()
        }
        notes.write_bytes(pickle.dumps((costs, reaching)))
        return False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._switch(item.location[0])  # fixtures of a whole file: what they reach, all its tests do

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._switch(item.nodeid)


def _paths(file: str) -> set[Path]:
    return {ROOT / f"tests/{test}.py" for test in TESTS[file].split()}


def _fails(mutant: Mutant, copies: Path, items: list[pytest.Item], costs: Costs, job: int) -> bool:
    """Whether one of these tests fails with the change, or takes far longer than without."""
    copy = copies / str(job)
    (copy / "penstock" / mutant.file).write_text(mutant.text)
    _load(mutant)
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    for item, after in zip_longest(items, items[1:]):
        faulthandler.dump_traceback_later(20 + 5 * costs[item.nodeid][1], exit=True, file=NOTHING)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if item.session.testsfailed:
            item.session._setupstate.teardown_exact(None)
            return True
    return False


def _load(mutant: Mutant) -> None:
    """Gives all functions of the file that exist the code of the changed file."""
    path = str(ROOT / "src/penstock" / mutant.file)
    wanted = _codes(compile(mutant.text, path, "exec"))
    known = _codes(compile((ROOT / "src/penstock" / mutant.file).read_text(), path, "exec"))
    by_line = {
        (code.co_qualname, code.co_firstlineno): wanted.get(place, code) for place, code in known.items()
    }
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename == path:
            function.__code__ = by_line[function.__code__.co_qualname, function.__code__.co_firstlineno]


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """Of all functions in it, by name; those with the same one in their order."""
    found: dict[tuple[str, int], CodeType] = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            for one in (inner, *_codes(inner).values()):
                number = sum(name == one.co_qualname for name, _ in found)
                found[one.co_qualname, number] = one
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE[:LINE]", help="of these only")
    parser.add_argument("--most", type=int, default=0, help="changes of each file, drawn; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    chosen: dict[str, list[Mutant]] = {}
    for name in given.files or TESTS:
        file, _, line = name.partition(":")
        possible = [mutant for mutant in mutants(file) if not line or mutant.line == int(line)]
        if given.most:
            possible = random.Random(given.seed).sample(possible, min(given.most, len(possible)))
        chosen.setdefault(file, []).extend(sorted(possible, key=lambda mutant: mutant.line))
    show = os.fdopen(os.dup(1), "w", buffering=1)
    for stream in (1, 2):
        os.dup2(NOTHING, stream)
    trial = Trial(chosen, given.jobs, show)
    paths = sorted({str(path) for file in chosen for path in _paths(file)})
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=native", *paths], [trial])
    return int(len(trial.shares) < len(chosen) or min(trial.shares) < WANTED)


if __name__ == "__main__":
    sys.exit(main())
