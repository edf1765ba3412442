"""Which tests run, and which of them in one process.

pytest             the fast tier: every file but those marked `full`; and those that are named
pytest --full      everything, and the examples and founding documents on real engines
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.device import without_gpu

SHARED = (
    "cluster",
    "demo",
    "demo_process",
    "demo_sglang",
    "demo_lora",
    "assistant",
    "embedder",
    "vision",
)
"""Fixtures that whole sessions share, the dearest first. Tests that use the same one run in one process."""

ENGINES = {"vllm": "demo", "process": "demo_process", "sglang": "demo_sglang"}
"""Parameters of `under_test` that are such fixtures."""

_GROUPS = "TESTS_GROUPS"
_started: dict[str, tuple[pytest.FixtureDef, pytest.FixtureRequest]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="the full tier, too: what `make test-all` runs")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="penstock-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        os.environ[_GROUPS] = f"{folder}/groups.json"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the full tier unless it is asked for, and puts first what takes longest."""
    if not config.getoption("full"):
        named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
        left_out = [item for item in items if item.get_closest_marker("full") and item.path not in named]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full") or item.path in named]
    if (why := without_gpu()) is not None:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {why}"))
    order = {name: place for place, name in enumerate(SHARED)}
    items.sort(key=lambda item: order.get(group(item), len(SHARED)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Leaves the groups where xdist's scheduler finds them: its process collects nothing.

    Before xdist's own hook, which tells the scheduler that it may look.
    """
    if hasattr(session.config, "workerinput"):
        file = Path(os.environ[_GROUPS])
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({item.nodeid: group(item) for item in session.items}))
        draft.replace(file)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    if fixturedef.argname in SHARED:
        _started[fixturedef.argname] = fixturedef, request
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Ends what a group shares after its last test: idle engines and clusters cost the other tests time."""
    torn_down = yield
    if nextitem is not None and group(nextitem) != group(item):
        while _started:
            fixturedef, request = _started.popitem()[1]
            fixturedef.finish(request)
    return torn_down


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    from xdist.scheduler import LoadScopeScheduling

    class Together(LoadScopeScheduling):
        groups: dict[str, str] | None = None

        def _split_scope(self, nodeid: str) -> str:
            if self.groups is None:
                self.groups = json.loads(Path(os.environ[_GROUPS]).read_text())
            return self.groups[nodeid]

    return Together(config, log)


def group(item: pytest.Item) -> str:
    """The shared fixture that the test asks for, itself or by another fixture; else its file."""
    names = set(getattr(item, "fixturenames", ()))
    if "under_test" in names and hasattr(item, "callspec"):
        parametrized: Any = item
        names.add(ENGINES.get(parametrized.callspec.params.get("under_test"), ""))
    return next((fixture for fixture in SHARED if fixture in names), item.location[0])
