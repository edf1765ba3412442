"""The two tiers: what runs by default, what runs when it is named, and what runs in one process."""

import asyncio

import pytest
from tests.limits import limited

pytest_plugins = ["pytester"]

FILES = {
    "test_fast": "def test_fast(): pass",
    "test_slow": "import pytest\npytestmark = pytest.mark.full\ndef test_slow(): pass",
    "test_shared": """
import pytest

@pytest.fixture
def assistant(): pass

@pytest.fixture
def asked(assistant): pass

@pytest.fixture(params=["sim", "vllm"])
def under_test(request): pass

def test_asks(asked): pass
def test_asks_nobody(): pass
def test_asks_each(under_test): pass
""",
}


@pytest.fixture
def tree(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("TESTS_GROUPS", "")  # else the runs inside would replace this run's
    pytester.makeini("[pytest]\nmarkers = full")
    pytester.makepyfile(**FILES)
    return pytester


def collected(tree: pytest.Pytester, *arguments: str) -> list[pytest.Item]:
    """In their order, without those that were left out."""
    found: list[pytest.Item] = []

    class Finished:
        @staticmethod
        def pytest_collection_finish(session: pytest.Session) -> None:
            found.extend(session.items)

    tree.inline_run("--collect-only", "-p", "tests.tiers", *arguments, plugins=[Finished()])
    return found


@pytest.mark.parametrize(
    ("arguments", "ran"),
    [
        ([], {"fast", "shared"}),
        (["--full"], {"fast", "shared", "slow"}),
        (["test_slow.py"], {"slow"}),
        (["test_slow.py::test_slow"], {"slow"}),
    ],
)
def test_the_full_tier_runs_when_it_is_asked_for_or_named(
    tree: pytest.Pytester, arguments: list[str], ran: set[str]
):
    assert {item.path.stem.removeprefix("test_") for item in collected(tree, *arguments)} == ran


def test_tests_go_together_by_the_fixtures_that_they_use(tree: pytest.Pytester):
    from tests.tiers import group

    items = collected(tree, "test_shared.py")
    assert {item.name: group(item) for item in items} == {
        "test_asks": "assistant",
        "test_asks_nobody": "test_shared.py",
        "test_asks_each[sim]": "test_shared.py",
        "test_asks_each[vllm]": "demo",
    }
    assert [group(item) for item in items][:2] == ["demo", "assistant"]  # what takes longest goes first


async def test_a_test_that_waits_for_ever_ends():
    with pytest.raises(TimeoutError):
        await limited(asyncio.Event().wait, 0.01)()
