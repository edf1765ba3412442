"""Imports go one way, in the whole house and in each of its rooms. Type-only imports count, too."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import penstock
from penstock.engines.vllm.arguments.source import syntax_tree

ROOT = Path(penstock.__file__).parent
# Each room may import those after it, never those before it. Rooms on one line do not know each other.
HOUSES: dict[str, list[set[str]]] = {
    "penstock": [
        {"cli"},
        {"bench", "serve", "kuberay"},
        {"jobs"},
        {"data"},
        {"layers", "preflight"},
        {"hooks", "transport", "engines"},
        {"asgi_client", "sources"},
        {"request_context"},
        {"engine"},
        {"engine_control", "openai", "ray_version", "json_logs"},
        {"asgi", "config", "temporary_folder", "tiers"},
        {"autoscaling", "errors", "metrics", "on_thread", "options", "processes", "progress"},
    ],
    "penstock.serve": [
        {"builders"},
        {"deployments"},
        {"router"},
        {"replica", "jobs"},
        {"gateway"},
        {"routing"},
        {"fleet"},
        {"control"},
        {"http", "tenancy"},
    ],
    "penstock.data": [
        {"table"},
        {"job", "pipeline"},
        {"journal", "execution"},
        {"backends"},
        {"results"},
        {"rows"},
        {"storage"},
    ],
    "penstock.config": [{"fleet"}, {"derive", "loading"}, {"schema"}, {"messages"}],
    "penstock.engines.vllm": [
        {"engine"},
        {"control"},
        {"rows"},
        {"frontend"},
        {"core", "media", "tokenizing"},
        {"continued"},
        {"capabilities"},
        {"arguments"},
    ],
    "penstock.cli": [{"batch", "serve"}, {"client"}, {"models"}, {"process"}],
    "penstock.bench": [{"report"}, {"run"}, {"load"}],
}
# A room that knows nothing of these.
APART = {
    "serve": {"data"},
    "kuberay": {"jobs", "data"},
    "bench": {"layers", "transport", "engines", "engine", "sources", "config", "jobs", "data"},
}
# Foreign packages, and the only places that may import them.
EDGES = {
    "vllm": {"engines/vllm"},
    "ray": {"serve", "data", "cli", "engines/vllm/core/other_nodes"},
    "uvicorn": {"serve/http"},
    "httptools": {"bench/load", "serve/http", "transport"},
    "pyarrow": {"sources", "data/storage", "data/pipeline", "data/results", "data/table"},
    "pandas": {"data"},
    "fsspec": {"sources", "data/storage"},
    "huggingface_hub": {"sources"},
    "opentelemetry": {"serve/gateway/telemetry"},
}
PEERS = ("ray.llm", "ray.serve.llm", "ray.data.llm")


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(syntax_tree(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


FILES = {_name(path): path for path in ROOT.rglob("*.py")}
FOREIGN = {name: set(_imported(path)) for name, path in FILES.items()}


def _module(dotted: str) -> str:
    return dotted if dotted in FILES else dotted.rpartition(".")[0]


IMPORTS = {
    name: {_module(dotted) for dotted in found if _module(dotted) in FILES} - {name}
    for name, found in FOREIGN.items()
}
IMPORTS["penstock"] = set()  # it offers names of its rooms, each of which it imports when it is used


def _folder(module: str) -> str:
    """Modules directly below `penstock`, and packages' own names, are rooms by themselves."""
    above = module.rpartition(".")[0]
    return module if FILES[module].name == "__init__.py" or above == "penstock" else above


def _circle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_by_way_of_others():
    assert _circle(IMPORTS) == []


def test_no_folder_imports_itself_by_way_of_others():
    graph: dict[str, set[str]] = {}
    for module, found in IMPORTS.items():
        graph.setdefault(_folder(module), set()).update(map(_folder, found))
    assert _circle({room: found - {room} for room, found in graph.items()}) == []


@pytest.mark.parametrize("house", HOUSES)
def test_rooms_import_only_downwards(house: str):
    floors = {room: floor for floor, rooms in enumerate(HOUSES[house]) for room in rooms}

    def room(module: str) -> str:
        return module.removeprefix(f"{house}.").split(".")[0] if module.startswith(f"{house}.") else ""

    wrong = [
        f"{module} imports {target}"
        for module, found in IMPORTS.items()
        for target in found
        if room(module) in floors and room(target) in floors and room(module) != room(target)
        if floors[room(target)] <= floors[room(module)] or room(target) in APART.get(room(module), set())
    ]
    assert wrong == []


@pytest.mark.parametrize("house", HOUSES)
def test_every_room_has_its_place(house: str):
    depth = house.count(".") + 1
    rooms = {
        name.split(".")[depth]
        for name, path in FILES.items()
        if name.startswith(f"{house}.") and (path.name == "__init__.py" or name.count(".") == depth)
    }
    folders = {room for room in rooms if (ROOT.parent / house.replace(".", "/") / room).is_dir()}
    ours = {room for floor in HOUSES[house] for room in floor}
    assert folders - {"demo"} <= ours
    assert house != "penstock" or rooms - {"demo"} <= ours


def test_foreign_packages_stay_at_their_edges():
    wrong = [
        f"{name} imports {package}"
        for name, found in FOREIGN.items()
        for package, edges in EDGES.items()
        if any(dotted.split(".")[0] == package for dotted in found)
        and not any(name.startswith(f"penstock.{edge.replace('/', '.')}") for edge in edges)
    ]
    assert wrong == []


def test_the_peers_packages_are_never_imported():
    wrong = [
        f"{name} imports {dotted}"
        for name, found in FOREIGN.items()
        for dotted in found
        if any(dotted == peer or dotted.startswith(f"{peer}.") for peer in PEERS)
    ]
    assert wrong == []


def test_folders_hold_two_to_fifteen_files():
    sizes: dict[str, int] = {}
    for name, path in FILES.items():
        if path.name != "__init__.py":
            sizes[name.rpartition(".")[0]] = sizes.get(name.rpartition(".")[0], 0) + 1
    assert {folder: size for folder, size in sizes.items() if not 2 <= size <= 15} == {}
