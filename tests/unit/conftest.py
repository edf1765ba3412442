"""What tests without Ray share: none of them knows whether others have a cluster in the same process."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    if "ray" in sys.modules:
        monkeypatch.setattr("ray.is_initialized", lambda: False)
