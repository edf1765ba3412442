"""Every task has an owner, which keeps it and looks at it again (docs/inside/concurrency.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import penstock
from penstock.engines.vllm.arguments.source import syntax_tree

ROOT = Path(penstock.__file__).parent
CREATORS = {"create_task", "ensure_future"}


def creates_task(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CREATORS


def problems(tree: ast.Module) -> list[str]:
    """Tasks that are dropped at once, and attributes that hold one which nothing reads."""
    nodes = list(ast.walk(tree))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    found = [
        f"line {node.lineno}: dropped"
        for node in nodes
        if isinstance(node, ast.Expr) and creates_task(node.value)
    ]
    for node in nodes:
        if isinstance(node, ast.Assign) and any(creates_task(inner) for inner in ast.walk(node.value)):
            held = [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
            found += [f"line {node.lineno}: nothing reads {name}" for name in held if name not in read]
    return found


def test_tasks_are_kept_and_looked_at():
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.rglob("*.py")}
    concerned = {name: text for name, text in texts.items() if any(creator in text for creator in CREATORS)}
    found = {name: problems(syntax_tree(text)) for name, text in concerned.items()}
    assert not {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "source",
    ["asyncio.create_task(work())", "loop.create_task(work())", "self._task = asyncio.create_task(work())"],
)
def test_a_task_without_an_owner_is_found(source: str):
    assert problems(ast.parse(source))
