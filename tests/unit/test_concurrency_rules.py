"""Rules of docs/inside/concurrency.md that the syntax tree shows. What blocks is ruff's part: ASYNC rules."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

import penstock
from penstock.engines.vllm.arguments.names import syntax_tree

ROOT = Path(penstock.__file__).parent
CREATORS = {"create_task", "ensure_future"}
WAITS = {"wait", "get", "join", "acquire"}
LIMITS = ("asyncio.timeout(", "asyncio.timeout_at(")
WAITED_IN = ("serve", "jobs", "layers")
"""Folders whose waits must have an end that is seen: in a block with a limit, or in `ENDS`."""

ENDS = {
    "jobs/service.py JobService.wait_ready": "its only caller waits for nothing else",
    "jobs/service.py JobService.wait_idle": "batches end at their windows",
    "layers/adapters/store.py Store._take_spare_slot": "the last request that uses an adapter; `stop`",
    "layers/postprocessing.py _Answer._break_off": "its task is cancelled once `failed` is set",
    "serve/http/connection_limits.py WorkLimiter.room": "the loop's next turns",
    "serve/http/listener.py _first_message": "its caller's limit",
    "serve/jobs/deployment.py LLMJobs.stay": "requests end; Serve ends it with the process",
    "serve/replica/inbound/rows.py RowReceiver._read": "`close`, by whichever side ends the connection",
    "serve/replica/inbound/rows.py RowReceiver.serve": "`close`, by whichever side ends the connection",
    "serve/replica/gang.py GangLink._share": "`broken`, which ends the process",
    "serve/replica/server.py LLMServer._exit_with_gang": "lasts as long as the replica, which cancels it",
    "serve/replica/server.py LLMServer._serve": "the start of the engine, or the request's client",
    "serve/replica/server.py LLMServer._admit": "the start of the engine, or the request's caller",
    "serve/replica/server.py LLMServer._engine_app": "the start of the engine, or the request's client",
    "serve/replica/tiers/layer.py Turns.batch": "ticks, which start batch requests; the request's client",
}
UNSEEN = {
    "data/job/driver.py _run_together": "the first error is raised, and has cancelled the others",
    "data/job/worker.py BatchWorker.stop": "rows have outcomes in place of errors",
    "data/job/driver.py Driver.run": "the queue has its error; the others are cancelled",
    "jobs/runner.py RunningBatch._run_rows": "the batch's next status replaces what failed",
    "serve/control/link.py _until_one_ends": "what ended is looked at, the others are cancelled",
}
SHIELDED = {"layers/adapters/store.py Store._take": "`_drop` returns a task that the store keeps"}
SWALLOWED = {"on_thread.py completed": "raised once the work has ended"}

Found = Iterator[tuple[ast.AST, str]]


def called(node: ast.AST | None, names: set[str]) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names


def tasks(tree: ast.Module) -> Found:
    """Tasks that are dropped at once, and attributes that hold one which nothing reads."""
    nodes = list(ast.walk(tree))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.Expr) and called(node.value, CREATORS):
            yield node, "a task is dropped"
        if isinstance(node, ast.Assign) and any(called(inner, CREATORS) for inner in ast.walk(node.value)):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and target.attr not in read:
                    yield node, f"nothing reads the task {target.attr}"


def swallowed(tree: ast.Module) -> Found:
    """Cancellations that end here."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)]
    for node in {inner for function in functions for inner in ast.walk(function)}:
        if isinstance(node, ast.ExceptHandler):
            kinds = ast.unparse(node.type) if node.type else "BaseException"
            if ("BaseException" in kinds or "CancelledError" in kinds) and not any(
                isinstance(inner, ast.Raise) for inner in ast.walk(node)
            ):
                yield node, f"{kinds} is caught and not raised"


def waits(tree: ast.Module) -> Found:
    """Waits for an event, a queue or a lock that have no limit."""
    limited = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith) and ast.unparse(node.items[0]).startswith(LIMITS)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Await) or not called(node.value, WAITS) or node in limited:
            continue
        if not (node.value.args or node.value.keywords):
            yield node, f"{ast.unparse(node)} has no limit"


def unseen(tree: ast.Module) -> Found:
    """Results and errors that are gathered and dropped."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and "return_exceptions=True" in ast.unparse(node):
            yield node, "nobody looks at the exceptions"


def shielded(tree: ast.Module) -> Found:
    """Work that goes on when its caller is cancelled, and that nobody holds."""
    for node in ast.walk(tree):
        if called(node, {"shield"}) and isinstance(node.args[0], ast.Call):
            yield node, "nobody holds what is shielded"


def counts(tree: ast.Module) -> Found:
    """Counts that a function takes and gives back, unless in the `finally` of what follows at once."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.AsyncFunctionDef):
            continue
        nodes = list(ast.walk(function))
        changes = [node for node in nodes if isinstance(node, ast.AugAssign)]
        awaits = [node.lineno for node in nodes if isinstance(node, ast.Await | ast.AsyncWith | ast.AsyncFor)]
        given_back = {
            (ast.unparse(node.target), ast.unparse(node.value)): attempt.lineno
            for attempt in nodes
            if isinstance(attempt, ast.Try)
            for last in attempt.finalbody
            for node in ast.walk(last)
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Sub)
        }
        taken = {
            (ast.unparse(node.target), ast.unparse(node.value))
            for node in changes
            if isinstance(node.op, ast.Sub)
        }
        for node in changes:
            key = ast.unparse(node.target), ast.unparse(node.value)
            if (
                isinstance(node.op, ast.Add)
                and isinstance(node.target, ast.Attribute | ast.Subscript)
                and key in taken
            ):
                until = given_back.get(key)
                if until is None or any(node.lineno < line < until for line in awaits):
                    yield node, f"{key[0]} may not be given back"


RULES = {tasks: {}, swallowed: SWALLOWED, waits: ENDS, unseen: UNSEEN, shielded: SHIELDED, counts: {}}


def functions(tree: ast.Module) -> Iterator[tuple[int, int, str]]:
    """First and last line and name of each function, the outermost first."""
    for node in tree.body:
        members = (
            [(f"{node.name}.", one) for one in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        )
        for prefix, one in members:
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                yield one.lineno, one.end_lineno or 0, prefix + one.name


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_to(rule):
    used, found = set[str](), list[str]()
    for path in sorted(ROOT.rglob("*.py")):
        name, tree = path.relative_to(ROOT).as_posix(), syntax_tree(path.read_text())
        if rule is waits and not name.startswith(WAITED_IN):
            continue
        for node, what in rule(tree):
            where = next((at for first, last, at in functions(tree) if first <= node.lineno <= last), "")
            used.add(f"{name} {where}")
            if f"{name} {where}" not in RULES[rule]:
                found.append(f"{name}:{node.lineno} {where}: {what}")
    assert not found
    assert used >= set(RULES[rule]), "an exception that is needed no more"


BAD = {
    "asyncio.create_task(work())": tasks,
    "loop.create_task(work())": tasks,
    "self._task = asyncio.create_task(work())": tasks,
    "try: await work()\nexcept: pass": swallowed,
    "try: await work()\nexcept (OSError, asyncio.CancelledError): pass": swallowed,
    "await self._event.wait()": waits,
    "async with self._lock: await self._queue.get()": waits,
    "await asyncio.gather(*tasks, return_exceptions=True)": unseen,
    "await asyncio.shield(asyncio.create_task(work()))": shielded,
    "self.open += 1\nawait work()\nself.open -= 1": counts,
    "self.open += 1\nawait a()\ntry: await b()\nfinally: self.open -= 1": counts,
}


def parsed(lines: str) -> ast.Module:
    """The lines in an async function."""
    return ast.parse("async def f():\n" + textwrap.indent(lines, "    "))


@pytest.mark.parametrize("source", BAD)
def test_what_breaks_it_is_found(source: str):
    assert list(BAD[source](parsed(source)))


GOOD = {
    "async with asyncio.timeout(1): await self._event.wait()": waits,
    "await asyncio.wait_for(event.wait(), 1)": waits,
    "self.open += 1\ntry: await work()\nfinally: self.open -= 1": counts,
}


@pytest.mark.parametrize("source", GOOD)
def test_what_keeps_to_it_is_not_found(source: str):
    assert not list(GOOD[source](parsed(source)))
