"""Nothing outlives its owner, at whatever moment of its engine's start that is killed."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from dying import nothing_is_left_when_the_owner_is_killed

pytestmark = pytest.mark.full


@pytest.mark.parametrize("phase", ["import", "load", "ready"])
def test_nothing_is_left_when_the_owner_is_killed(phase: str):
    """An engine in a process of its own, which is killed."""
    with TemporaryDirectory() as folder:  # its name is short enough for an engine's sockets
        nothing_is_left_when_the_owner_is_killed(phase, Path(folder))
