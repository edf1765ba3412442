"""The names of models behind one gateway: ids, aliases, and which models stand in for which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from penstock.config.derive.serve_options import deployment_name
from penstock.config.messages.problems import unknown
from penstock.config.schema.model import LLMConfig


def problems(configs: Sequence[LLMConfig]) -> list[str]:
    """A sentence for each alias or deployment name that is taken, each unknown fallback, and each loop of
    fallbacks.
    """
    taken = {config.model_id: config for config in configs}
    found = _deployments(configs)
    for config in configs:
        for alias in config.aliases:
            owner = taken.get(alias, config)
            if alias in taken and (owner is config or _public(owner) != _public(config)):
                where = config.location / "aliases"
                found.append(where.says(f"{alias!r} is already a name of {owner.model_id!r}."))
            taken.setdefault(alias, config)
    ids = {name: _public(config) for name, config in taken.items()}
    for config in configs:
        where = config.location / "fallbacks"
        found += [where.says(unknown("model", name, ids)) for name in config.fallbacks if name not in ids]
    return found + _loops(configs, ids)


def adapter_in(config: LLMConfig, name: str) -> str:
    """The adapter that `name` has behind one of the model's names and a colon; "" for none."""
    for own in (config.model_id, *config.aliases):
        if name.startswith(f"{own}:"):
            return name.removeprefix(f"{own}:")
    return ""


def fallbacks(
    models: Mapping[str, tuple[Sequence[str], Sequence[str]]], versions: Mapping[str, str] | None = None
) -> dict[str, tuple[str, ...]]:
    """For each model the ids of those that stand in for it, in the order in which they are asked: each
    fallback, and behind it its own.

    models: aliases and fallbacks by id, without `problems`. versions: ids, and the models that they are
    versions of; for such a model all its versions stand in.
    """
    public = {model: (versions or {}).get(model, model) for model in models}
    ids = {name: public[model] for model, (aliases, _) in models.items() for name in (model, *aliases)}
    named = {public[model]: [ids[name] for name in names] for model, (_, names) in models.items()}
    return {
        model: tuple(
            one for other in _order(public[model], named)[1:] for one in models if public[one] == other
        )
        for model in models
    }


def _order(model: str, named: Mapping[str, Sequence[str]]) -> list[str]:
    order = [model]
    for other in named[model]:
        order += [name for name in _order(other, named) if name not in order]
    return order


def _deployments(configs: Sequence[LLMConfig]) -> list[str]:
    """Handles, shifts and Serve's own API find a model by the name of its deployment."""
    owners: dict[str, LLMConfig] = {}
    found: list[str] = []
    for config in configs:
        name = config.deployment_config.get("name") or deployment_name(config.model_id)
        first = owners.setdefault(name, config).model_id
        if first != config.model_id:
            where = config.location / "model_loading_config" / "model_id"
            both = f"{config.model_id!r} and {first!r} would both be Ray Serve's deployment {name!r}"
            found.append(where.says(f"{both}; rename one."))
    return found


def _loops(configs: Sequence[LLMConfig], ids: Mapping[str, str]) -> list[str]:
    named = {_public(config): [ids[name] for name in config.fallbacks if name in ids] for config in configs}
    try:
        TopologicalSorter(named).prepare()
    except CycleError as error:
        order = list(named)
        *ring, _ = reversed(error.args[1])
        start = ring.index(min(ring, key=order.index))
        path = [*ring[start:], *ring[:start], ring[start]]
        first = next(config for config in configs if _public(config) == path[0])
        where = first.location / "fallbacks"
        return [where.says(f"goes in a circle: {' -> '.join(map(repr, path))}. Leave one of them out.")]
    return []


def _public(config: LLMConfig) -> str:
    """The model that it is, or is a version of."""
    return config.version.of if config.version else config.model_id
