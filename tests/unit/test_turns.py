"""Models that take turns on the same memory: one wakes only when another one has let go of it."""

import pytest

from penstock.errors import Unavailable
from penstock.serve.control import deployment as control
from penstock.serve.control.state import Desired, Group, Told
from penstock.serve.control.time_sharing import Turns

GROUP = Group("g", awake=1, min_awake_s=0.0)


class Control:
    """What `Turns` asks of control: desired state, and replicas that sleep when `obeys` says so."""

    def __init__(self, *models: str) -> None:
        self.asked: list[tuple[str, str]] = []
        self.obeys = True
        self.wanted = {model: Desired() for model in models}
        self.actual = dict.fromkeys(models, "ready")
        self.on_their_way: set[str] = set()
        self.turns = Turns(self)
        for model in models:
            self.turns.enter(model, self.told(model))

    def told(self, model: str) -> Told:
        return Told(
            *(f"{model}-1", self.actual[model], "default", 1, self.wanted[model]),
            group=GROUP,
            on_its_way=model in self.on_their_way,
        )

    def desired(self, model: str) -> Desired:
        return self.wanted[model]

    def living(self, model: str) -> dict[str, Told]:
        return {f"{model}-1": self.told(model)}

    def idle_s(self, model: str) -> float:
        return 1.0

    async def perform(self, operation: str, model: str, **arguments):
        self.asked.append((operation, model))
        self.wanted[model] = Desired(version=1, sleep=int(operation == "sleep"))
        if self.obeys:
            self.actual[model] = "asleep" if operation == "sleep" else "ready"
        return {"ok": self.obeys, "replicas": {}}


async def test_a_model_that_did_not_fall_asleep_keeps_its_memory_from_others():
    fleet = Control("a", "b")
    await fleet.perform("sleep", "b")
    fleet.obeys = False
    for _ in range(2):  # the gateway asks again
        with pytest.raises(Unavailable, match="'a' did not go to sleep"):
            await fleet.turns.want("b")
    fleet.obeys = True
    await fleet.turns.want("b")
    assert fleet.asked[1:] == [("sleep", "a")] * 3 + [("wakeup", "b")]


async def test_a_model_that_is_falling_asleep_keeps_its_memory_until_it_sleeps():
    fleet = Control("a", "b")
    await fleet.perform("sleep", "b")
    fleet.obeys = False
    fleet.actual["a"] = "asleep"  # so gateways send it nothing, but its last request goes on
    fleet.on_their_way.add("a")
    await fleet.perform("sleep", "a")
    with pytest.raises(Unavailable, match="'a' did not go to sleep"):
        await fleet.turns.want("b")
    fleet.obeys = True
    fleet.on_their_way.clear()
    await fleet.turns.want("b")
    assert fleet.asked[-1] == ("wakeup", "b")


def test_control_forgets_gateways_that_have_ended():
    made = control.LLMControl.__new__(control.LLMControl)
    ended, lives = control._Gateway(), control._Gateway()
    lives.heard({})
    ended.at = lives.at - control._GONE_S - 1
    made._gateways = {"ended": ended, "lives": lives}
    made._forget_gateways()
    assert made._gateways == {"lives": lives}


def test_a_controller_that_does_not_answer_is_not_taken_for_no_control(monkeypatch: pytest.MonkeyPatch):
    def raising(error: Exception):
        def get(name: str):
            raise error

        return get

    monkeypatch.setattr(control.serve, "get_deployment_handle", raising(KeyError("does not exist")))
    assert control.find() is None
    monkeypatch.setattr(control.serve, "get_deployment_handle", raising(RuntimeError("no controller")))
    with pytest.raises(RuntimeError, match="no controller"):
        control.find()
