"""`plan`: from two fleets and what a cluster has to what an apply will do. A pure function of these."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from penstock.config.derive.placement import gang_size
from penstock.config.derive.prefill import halves, prefill_name
from penstock.config.derive.serve_options import (
    ROUTER,
    autoscaling,
    deployment_name,
    replica_range,
    reserved,
)
from penstock.config.fleet import changes
from penstock.config.fleet.changes import Cost
from penstock.config.fleet.document import document
from penstock.config.loading.serving_args import LLMServingArgs
from penstock.config.messages.redact import STARS, is_secret, masked
from penstock.config.schema.model import LLMConfig
from penstock.config.schema.processing import own_deployment
from penstock.config.schema.sections import BatchConfig, Nodes

Action = Literal["added", "removed", "rolled", "scaled", "live", "unchanged"]
_SECTIONS = ("deployment_config", "batch", "experimental_configs", "version", "lora_config")
"""Fields whose parts cost something else each."""

_UNITS = ("GPU", "CPU")


@dataclass(frozen=True, slots=True)
class Change:
    """One field. before and after: without secrets."""

    path: str
    before: Any
    after: Any
    cost: Cost


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What happens to a model.

    restarts: deployments all of whose replicas are replaced. replicas: before and after, at the least.
    gpus: of one replica. surge: replicas that start before old ones end; `cuts` says what users notice.
    """

    model: str
    action: Action
    changes: Sequence[Change] = ()
    restarts: Sequence[str] = ()
    replicas: tuple[int, int] = (0, 0)
    gpus: float = 0.0
    surge: int = 0
    cuts: str = ""

    @property
    def surge_percent(self) -> int:
        """`max_surge_percent` for it."""
        return math.ceil(100 * self.surge / self.replicas[0])


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What an apply does. gpus: now, afterwards, and at the most in between. capacity: None if not known.
    is_complete: whether `before` was there as a whole.
    """

    models: Sequence[ModelPlan]
    gateway: Sequence[Change] = ()
    restarts: Sequence[str] = ()
    gpus: tuple[float, float, float] = (0.0, 0.0, 0.0)
    capacity: float | None = None
    faults: Sequence[str] = ()
    notes: Sequence[str] = ()
    is_complete: bool = True

    @property
    def summary(self) -> str:
        """In a line."""
        said = [f"{one.model} {one.action}" for one in self.models if one.action != "unchanged"]
        said += [f"gateway.{change.path}" for change in self.gateway]
        return ", ".join(said) or "no change"

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be done."""
        changed = self.gateway or self.restarts or any(model.action != "unchanged" for model in self.models)
        return self.is_complete and not changed

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"is_empty": self.is_empty, **asdict(self)}


def plan(
    before: LLMServingArgs,
    after: LLMServingArgs,
    restarts: Sequence[str] = (),
    nodes: Nodes | None = None,
    free: Mapping[str, float] | None = None,
    *,
    can_grow: bool = False,
) -> FleetPlan:
    """What happens when the fleet `before` becomes `after`.

    restarts: deployments of both whose versions differ. nodes: resources of each node; free: those that
    nobody holds. Without them nothing is said of room. can_grow: whether there may be more nodes later.
    Raises: ConfigError for a placement that cannot work.
    """
    old = {config.model_id: config for config in before.llm_configs}
    new = {config.model_id: config for config in after.llm_configs}
    room = dict(free or {})
    whole = [
        *_differing(vars(before.gateway), vars(after.gateway), changes.GATEWAY, restarts),
        *_differing(vars(before), vars(after), changes.SERVING, restarts),
    ]
    models = [
        _model(old.get(name), new.get(name), restarts, nodes, room) for name in dict.fromkeys([*old, *new])
    ]
    now, then = ({name: _gpus(config, nodes) for name, config in fleet.items()} for fleet in (old, new))
    most = (max(now.get(one.model, 0), then.get(one.model, 0)) + one.surge * one.gpus for one in models)
    gpus = _total(now.values()), _total(then.values()), _total(most)
    capacity = sum(node.get("GPU", 0) for node in nodes) if nodes is not None else None
    faults, notes = list[str](), list[str]()
    if capacity is not None and gpus[1] > capacity:
        lower = "lower `num_replicas` of a model, remove one, or give models `on_demand`, which take turns."
        needs = f"The fleet needs {gpus[1]:g} GPUs and the cluster has {capacity:g}: "
        if can_grow:
            notes.append(f"{needs}what has no room waits until the cluster grows. If it cannot, {lower}")
        else:
            faults.append(f"{needs}{lower}")
    elif capacity is not None and gpus[2] > capacity:
        notes.append(
            f"At the most {gpus[2]:g} GPUs would be in use and the cluster has {capacity:g}: new replicas "
            "wait until those that are removed have gone."
        )
    if (port := after.gateway.port) != before.gateway.port:
        has_files = after.jobs is not None and after.jobs.storage is None
        kept = f"usage, budgets, the audit log{', files and batches' if has_files else ''}"
        notes.append(f"At port {port} these begin anew, which a service keeps by its port: {kept}.")
    return FleetPlan(models, whole, restarts, gpus, capacity, faults, notes)


def _model(
    old: LLMConfig | None,
    new: LLMConfig | None,
    all_restarts: Sequence[str],
    nodes: Nodes | None,
    room: dict[str, float],
) -> ModelPlan:
    either = new or old
    assert either is not None
    replicas = (_replicas(old) if old else 0, _replicas(new) if new else 0)
    needs = _needs(either, nodes)
    named = partial(ModelPlan, either.model_id, replicas=replicas, gpus=needs["GPU"])
    if old is None:
        return named("added")
    if new is None:
        return named("removed", cuts="Its streams end by themselves.")
    found = list(_changes(old, new, all_restarts))
    names = set(_deployments(new))
    restarts = [name for name in all_restarts if name in names]
    costs = {change.cost for change in found}
    if not restarts and "new" not in costs:
        action = "scaled" if "scale" in costs else "live" if costs else "unchanged"
        return named(action, found)
    if restarts and "roll" not in costs:  # a source has a login: it is part of the deployment
        found = [replace(one, cost="roll") if one.path in changes.ADAPTERS else one for one in found]
    surge = _surge(new, replicas[0], needs, room) if restarts else 0
    return named("rolled", found, restarts, surge=surge, cuts=_cuts(new, replicas[0], surge))


def _changes(old: LLMConfig, new: LLMConfig, restarts: Sequence[str]) -> Iterator[Change]:
    """Each field that differs, and each part of `_SECTIONS`."""
    old, new = old.canonical, new.canonical
    begins_or_ends = len({autoscaling(one.deployment_config) is None for one in (old, new)}) > 1
    for name in LLMConfig.model_fields:
        before, after = ({name: getattr(config, name)} for config in (old, new))
        begins_or_stops = name == "lora_config" and None in (before[name], after[name])
        if name in _SECTIONS and not begins_or_stops:
            before, after = _parts(name, before[name]), _parts(name, after[name])
        costs: Mapping[str, Cost] = {
            path: changes.cost_of(path, decodes=new.prefill is not None, autoscales=begins_or_ends)
            for path in dict.fromkeys([*before, *after])
        }
        yield from _differing(before, after, costs, restarts)


def _parts(name: str, value: Any) -> Mapping[str, Any]:
    if name == "lora_config":
        value = document(value or {}, unset=True)
    elif name == "batch":
        value = document(value or BatchConfig(), unset=True)
    elif name == "version":
        value = document(value or {})
    return {f"{name}.{part}": one for part, one in value.items()}


def _deployments(config: LLMConfig) -> Iterator[str]:
    """Ray Serve's names of a model's."""
    yield config.deployment_config.get("name") or deployment_name(config.model_id)
    for half in halves(config)[1:]:
        yield prefill_name(half.model_id)
    if own_deployment(config.preprocessor_options) is not None:
        yield deployment_name(config.model_id, "Preprocessor:")


def _differing(
    before: Mapping[str, Any], after: Mapping[str, Any], costs: Mapping[str, Cost], restarts: Sequence[str]
) -> Iterator[Change]:
    for path, cost in costs.items():
        first, second = before.get(path), after.get(path)
        if first != second:
            if cost == "gateway" and ROUTER not in restarts:
                cost = changes.IN_PLACE.get(path, "live")
            yield Change(path, _shown(path, first), _shown(path, second), cost)


def _shown(path: str, value: Any) -> Any:
    """As JSON has it, without secrets."""
    parent, _, name = path.rpartition(".")
    if parent.endswith("env_vars"):
        return masked({"env_vars": {name: value}})["env_vars"][name]
    return STARS if is_secret(path) and value else masked(document(value, path))


def _replicas(config: LLMConfig) -> int:
    """Those that are there at the least, in a gang's count of engines."""
    scaling = autoscaling(config.deployment_config)
    least, _ = replica_range({**config.deployment_config, "autoscaling_config": scaling})
    return least * gang_size(config)


def _needs(config: LLMConfig, nodes: Nodes | None) -> Mapping[str, float]:
    """What one replica reserves."""
    bundles = reserved(config.get_serve_options(nodes=nodes))
    return {unit: sum(bundle.get(unit, 0) for bundle in bundles) for unit in _UNITS}


def _total(parts: Iterable[float]) -> float:
    """As Ray counts resources: in parts of 1/10,000. Three GPUs as 0.2 and 0.4 and 0.6 are no more than 3."""
    return round(sum(parts), 4)


def _gpus(config: LLMConfig, nodes: Nodes | None) -> float:
    """Those of all replicas that are there at the least, with prefill."""
    return sum(_replicas(half) * _needs(half, nodes)["GPU"] for half in halves(config))


def _surge(config: LLMConfig, replicas: int, needs: Mapping[str, float], room: dict[str, float]) -> int:
    """New replicas that start before old ones end: the user's own number, else as many as have room."""
    given = config.deployment_config.get("max_surge_percent")
    if given is not None and replicas:
        return math.ceil(given * replicas / 100)
    if gang_size(config) > 1 or config.prefill is not None or not room:
        return 0
    fit = min((int(room.get(unit, 0) // needs[unit]) for unit in _UNITS if needs[unit]), default=replicas)
    count = max(0, min(replicas, fit))
    for unit in _UNITS:
        room[unit] = room.get(unit, 0) - count * needs[unit]
    return count


def _cuts(config: LLMConfig, replicas: int, surge: int) -> str:
    if gang_size(config) > 1:
        return "The gang's streams are cut off."
    if surge:
        return ""
    if replicas == 1:
        return "Requests wait while its only replica restarts: there is no room for two."
    return "Its replicas are replaced a fifth at a time: there is no room for more."
