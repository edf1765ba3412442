"""Models that share memory: one wakes only when another one has given it back."""

from pathlib import Path

import pytest

from penstock.errors import Unavailable
from penstock.serve.control import followers, gateways
from penstock.serve.control.desired import DesiredStates
from penstock.serve.control.state import DesiredState, GatewayStatus, ReplicaStatus, RouteStatus, SharingGroup
from penstock.serve.control.time_sharing import TimeSharing
from penstock.serve.replica import reconciler

GROUP = SharingGroup("g", max_awake=1, min_awake_s=0.0)


class Control:
    """What `TimeSharing` asks of control: desired state, and replicas that sleep when `obeys` says so."""

    def __init__(self, *models: str) -> None:
        self.asked: list[tuple[str, str]] = []
        self.obeys = True
        self.wanted = {model: DesiredState() for model in models}
        self.actual = dict.fromkeys(models, "ready")
        self.in_transition: set[str] = set()
        self.turns = TimeSharing(self, self, self.perform)
        for model in models:
            self.turns.hear(self.status(model))

    def status(self, model: str) -> ReplicaStatus:
        return ReplicaStatus(
            *(f"{model}-1", self.actual[model], "default", 1, self.wanted[model]),
            group=GROUP,
            in_transition=model in self.in_transition,
            model=model,
        )

    def get(self, model: str) -> DesiredState:
        return self.wanted[model]

    def living(self, model: str) -> dict[str, ReplicaStatus]:
        return {f"{model}-1": self.status(model)}

    def idle_s(self, model: str) -> float:
        return 1.0

    async def perform(self, operation: str, model: str, **arguments):
        self.asked.append((operation, model))
        self.wanted[model] = DesiredState(version=1, sleep=int(operation == "sleep"))
        if self.obeys:
            self.actual[model] = "asleep" if operation == "sleep" else "ready"
        return {"ok": self.obeys, "replicas": {}}


async def test_a_model_that_did_not_fall_asleep_keeps_its_memory_from_others():
    fleet = Control("a", "b")
    await fleet.perform("sleep", "b")
    fleet.obeys = False
    for _ in range(2):  # the gateway asks again
        with pytest.raises(Unavailable, match="'a' did not go to sleep"):
            await fleet.turns.wake("b", {})
    fleet.obeys = True
    await fleet.turns.wake("b", {})
    assert fleet.asked[1:] == [("sleep", "a")] * 3 + [("wakeup", "b")]


async def test_a_model_that_is_falling_asleep_keeps_its_memory_until_it_sleeps():
    fleet = Control("a", "b")
    await fleet.perform("sleep", "b")
    fleet.obeys = False
    fleet.actual["a"] = "asleep"  # so gateways send it nothing, but its last request goes on
    fleet.in_transition.add("a")
    await fleet.perform("sleep", "a")
    with pytest.raises(Unavailable, match="'a' did not go to sleep"):
        await fleet.turns.wake("b", {})
    fleet.obeys = True
    fleet.in_transition.clear()
    await fleet.turns.wake("b", {})
    assert fleet.asked[-1] == ("wakeup", "b")


async def test_a_model_that_still_loads_keeps_its_memory_until_it_sleeps():
    fleet = Control("a", "b")
    await fleet.perform("sleep", "b")
    fleet.obeys = False
    fleet.actual["a"] = "starting"
    await fleet.perform("sleep", "a")
    with pytest.raises(Unavailable, match="'a' did not go to sleep"):
        await fleet.turns.wake("b", {})
    fleet.obeys = True
    fleet.actual["a"] = "asleep"
    await fleet.turns.wake("b", {})
    assert fleet.asked[-1] == ("wakeup", "b")


async def test_control_forgets_gateways_that_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(followers, "GONE_S", 0.0)
    made = gateways.Gateways(DesiredStates(tmp_path / "x.sqlite"), "own")
    made.hear(GatewayStatus("ended", {"old": RouteStatus("")}))
    lives = GatewayStatus("lives", {"m": RouteStatus("")})
    made.hear(lives)
    updates = made.updates("lives")
    await anext(updates)
    made.hear(lives)
    assert made.models() == {"m"}


def test_a_controller_that_does_not_answer_is_not_taken_for_no_control(patched):
    def raising(error: Exception):
        def get(name: str):
            raise error

        return get

    patched(reconciler.serve, "get_deployment_handle", raising(KeyError("does not exist")))
    assert reconciler.find_control() is None
    patched(reconciler.serve, "get_deployment_handle", raising(RuntimeError("no controller")))
    with pytest.raises(RuntimeError, match="no controller"):
        reconciler.find_control()
