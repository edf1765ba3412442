"""Imports go one way. Drawn in README.md; this test keeps it so."""

import ast
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent
GROUND = {"autoscaling", "errors", "lifeline", "progress", "metrics", "__init__"}
# Each room may import the rooms after it, and the ground.
ROOMS = [
    "cli",
    "bench",
    "data",
    "serve",
    "layers",
    "door",
    "engines",
    "hook",
    "call",
    "engine",
    "sources",
    "openai",
    "config",
]
# Rooms that stand beside each other: neither knows of the other, nor of what only the other needs.
APART = {
    "bench": {"data", "serve", "layers", "door", "engines", "engine", "sources", "config"},
    "data": {"serve"},
}
# Foreign packages and the only rooms that may name them.
EDGES = {
    "vllm": {"engines/vllm"},
    "ray": {"serve", "data", "cli"},
    "uvicorn": {"serve"},
    "pyarrow": {"sources/bucket.py", "data"},
    "pandas": {"data"},
    "fsspec": {"sources/fsspec_store.py", "data/storage/paths.py"},
    "huggingface_hub": {"sources/hub.py"},
    "opentelemetry": {"serve/gateway/telemetry/spans.py"},
}
PEERS = ("ray.llm", "ray.serve.llm", "ray.data.llm")


def imports(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


FILES = {path.relative_to(ROOT): imports(path) for path in ROOT.rglob("*.py")}


def test_rooms_import_only_downwards():
    wrong = []
    for path, modules in FILES.items():
        own = path.parts[0].removesuffix(".py")
        allowed = GROUND | {own} | (set(ROOMS[ROOMS.index(own) :]) if own in ROOMS else set())
        allowed -= APART.get(own, set())
        for module in modules:
            if module.startswith("penstock.") and room(module) in {*ROOMS, *GROUND} - allowed:
                wrong.append(f"{path} imports {module}")
    assert wrong == []


def test_every_room_has_its_place():
    rooms = {path.parts[0].removesuffix(".py") for path in FILES}
    assert rooms <= {*ROOMS, *GROUND}


def test_foreign_packages_stay_at_their_edges():
    wrong = []
    for path, modules in FILES.items():
        for package, edges in EDGES.items():
            if any(module.split(".")[0] == package for module in modules) and not any(
                path.as_posix().startswith(edge) for edge in edges
            ):
                wrong.append(f"{path} imports {package}")
    assert wrong == []


def test_the_peers_packages_are_never_imported():
    wrong = [
        f"{path} imports {module}"
        for path, modules in FILES.items()
        for module in modules
        if any(module == peer or module.startswith(f"{peer}.") for peer in PEERS)
    ]
    assert wrong == []
