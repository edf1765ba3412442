"""`penstock.serve.run` without Ray: how long a service that a program runs goes on."""

from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError

from penstock.errors import EngineStartFailed
from penstock.serve import running
from penstock.serve.running import RunningService


def test_a_restart_of_serves_controller_ends_no_service(monkeypatch: pytest.MonkeyPatch, patched):
    there = iter([None, ["app"], None, []])

    def status() -> SimpleNamespace:
        if (found := next(there)) is None:
            raise ActorUnavailableError("it restarts", None)
        return SimpleNamespace(applications=found)

    patched("ray.serve.status", status)
    monkeypatch.setattr(running, "_LOOK_S", 0.0)
    with pytest.raises(EngineStartFailed, match="'app' was deleted"):
        RunningService("", "app", own_ray=False).wait()
    assert not list(there)
