"""What the gateway knows of each model, and how `/v1/models` shows it."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from penstock.config import GatewayConfig, LLMConfig
from penstock.config.derive.placement import gang_size
from penstock.config.derive.serve_options import DEFAULTS, autoscaling
from penstock.config.schema.routing import DEFAULT_POLICY, SERVE_ROUTER, SESSION_HEADER
from penstock.config.schema.sections import BatchConfig
from penstock.config.schema.versions import VersionConfig
from penstock.errors import BadRequest, ConfigError, ModelNotFound, NotFound
from penstock.serve.http import limits

_MOST_WAITING = 1000  # requests for an on-demand model whose config gives no limit
_NAMED = 20  # models named in an error
_ALL = "*"
"""The adapter of a key that may use all adapters of a model."""
FIXED = ("host", "port", "tls", "processes", "log_format", "api_key", "admin_key")
"""Fields of the gateway's config of which a process has what it started with."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One served model. Units: created in seconds since 1970; limits in requests, -1 for an unbounded queue.

    engine_metrics: whether /metrics includes the engines'. policy_options: arguments of the routing policy.
    scales: whether the model may have several replicas. adapter_slots: adapters that a replica holds at a
    time; 0 for a model without adapters. paths: endpoints of its server class. batch_paths: of these, the
    ones that batches may ask. start_s: how long a request waits for a replica of a model that may have none,
    or none awake. on_demand: whether control wakes it on demand. aliases: more names for it. fallbacks: names
    of models that answer when it cannot. engine: its name in configs. max_queued_batch: batch requests that
    may wait. version: what it is a version of.
    """

    id: str
    created: int = field(compare=False)
    max_ongoing_requests: int = DEFAULTS["max_ongoing_requests"]
    max_queued_requests: int = -1
    engine_metrics: bool = True
    routing_policy: str = DEFAULT_POLICY
    policy_options: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)
    session_header: str = SESSION_HEADER
    scales: bool = field(default=True, compare=False)
    adapter_slots: int = 0
    paths: tuple[str, ...] = ()
    batch_paths: tuple[str, ...] = ()
    start_s: float | None = None
    on_demand: bool = False
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    engine: str = ""
    max_queued_batch: int = 1000
    version: VersionConfig | None = field(default=None, hash=False)

    @property
    def name(self) -> str:
        """By which clients know it: that of the model of which it is a version."""
        return self.version.of if self.version is not None else self.id

    @property
    def own_names(self) -> frozenset[str]:
        """Of a version, names that mean no other one."""
        return frozenset((self.id, self.version.full_name) if self.version else ()) - {self.name}

    @property
    def shared_aliases(self) -> tuple[str, ...]:
        """More names of the model, which all its versions have."""
        return tuple(one for one in self.aliases if one not in self.own_names | {self.name})

    @classmethod
    def of(cls, config: LLMConfig, paths: Sequence[str] = (), batch_paths: Sequence[str] = ()) -> ServedModel:
        """The entry of a configured model."""
        given = {name: value for name, value in config.deployment_config.items() if value is not None}
        options = {**DEFAULTS, **given}
        scaling, on_demand = autoscaling(given) or {}, config.on_demand is not None
        return cls(
            id=config.model_id,
            created=int(time.time()),
            max_ongoing_requests=options["max_ongoing_requests"],
            max_queued_requests=options.get("max_queued_requests", _MOST_WAITING if on_demand else -1),
            engine_metrics=config.log_engine_metrics,
            routing_policy=SERVE_ROUTER if config.serve_router is not None else config.routing_policy,
            policy_options=config.policy_options,
            session_header=config.routing_config.session_header.lower(),
            scales=gang_size(config) > 1
            or options.get("num_replicas", 1) != 1
            or "autoscaling_config" in options,
            adapter_slots=config.lora_config.max_num_adapters_per_replica if config.lora_config else 0,
            paths=tuple(paths),
            batch_paths=tuple(batch_paths),
            start_s=config.engine_start_timeout_s if scaling.get("min_replicas") == 0 or on_demand else None,
            on_demand=on_demand,
            engine=config.engine_name,
            aliases=tuple(config.aliases),
            fallbacks=tuple(config.fallbacks),
            max_queued_batch=(config.batch or BatchConfig()).max_queued_requests,
            version=config.version,
        )


@dataclass(frozen=True)
class LiveState:
    """What gateways, and the process of files and batches, take over while they run. Serve passes it on as
    the `user_config` of their deployments: as plain values, without secrets, because Serve shows it.

    deployments: their names, by model. prefill: models with prefill replicas. routers: by model, what
    changes with a request router of its own. drain_s: for open requests, at the gateway's end.
    """

    cards: tuple[ServedModel, ...]
    gateway: GatewayConfig
    deployments: dict[str, str] = field(default_factory=dict[str, str])
    prefill: tuple[str, ...] = ()
    routers: dict[str, str] = field(default_factory=dict[str, str])
    drain_s: float = 20.0

    def dump(self) -> dict[str, Any] | None:
        """Plain values, equal for equal states; None where a policy has options that JSON has not."""
        nothing = GatewayConfig.model_construct()
        fixed = {name: None if name.endswith("_key") else getattr(nothing, name) for name in FIXED}
        state = replace(
            self,
            cards=tuple(replace(card, created=0) for card in self.cards),
            gateway=self.gateway.model_copy(update=fixed),
        )
        try:
            return cast("dict[str, Any]", _adapter.dump_python(state, mode="json"))
        except PydanticSerializationError:
            return None

    @classmethod
    def parse(cls, plain: Any, before: LiveState) -> LiveState:
        """What `dump` has made of a state that follows `before`. Raises: ValueError for anything else."""
        found = _adapter.validate_json(msgspec.json.encode(plain))
        created: Mapping[str, int] = {card.id: card.created for card in before.cards}
        now = int(time.time())
        fixed = {name: getattr(before.gateway, name) for name in FIXED}
        return replace(
            found,
            cards=tuple(replace(card, created=created.get(card.id, now)) for card in found.cards),
            gateway=found.gateway.model_copy(update=fixed),
        )


_adapter = TypeAdapter(LiveState)


Pick = Callable[[Sequence[ServedModel]], ServedModel]
"""One of several versions of a model."""


class Catalogue:
    """The models behind one gateway. Finds the one that a request names."""

    def __init__(self, models: Sequence[ServedModel], default_model: str | None) -> None:
        """Raises: ConfigError when `default_model` is none of them, or an id comes twice."""
        self.models = {model.id: model for model in models}
        if len(self.models) < len(models):
            raise ConfigError(f"Two models have the same id; the ids are {', '.join(c.id for c in models)}.")
        self._public: dict[str, list[ServedModel]] = {}
        for model in models:
            self._public.setdefault(model.name, []).append(model)
        self._named: dict[str, Sequence[ServedModel]] = {
            **{alias: found for found in self._public.values() for alias in found[0].shared_aliases},
            **self._public,
            **{name: [model] for model in models for name in model.own_names},
        }
        if default_model is not None and default_model not in self._named:
            raise ConfigError(f"The default model '{default_model}' is none of {self._known()}.")
        only = models[0].name if len(self._public) == 1 else None
        self.default = default_model or only
        """The name of the model of requests that name none; None where they must."""
        self._adapters: Mapping[str, frozenset[str]] | None = None
        self._parts: dict[frozenset[str], Catalogue] = {}

    def only(self, names: frozenset[str] | None) -> Catalogue:
        """The part of it that a key with these `models` may use; None is for all. The rest is not there."""
        if names is None:
            return self
        part = self._parts.get(names)
        if part is None:
            part = self._parts[names] = self._part(names)
        return part

    def _part(self, names: frozenset[str]) -> Catalogue:
        allowed: dict[str, set[str]] = {}
        for name in names:
            with suppress(ModelNotFound):  # a key may outlive a model
                found, adapter = self._find(name)
                for model in found:
                    allowed.setdefault(model.id, set()).add(adapter)
        part = Catalogue([model for model in self.models.values() if model.id in allowed], None)
        part._adapters = {model: frozenset(adapters) for model, adapters in allowed.items()}
        if self.default is not None and part._may_any(self._named[self.default], ""):
            part.default = self.default
        elif part.default is not None and not part._may_any(part._named[part.default], ""):
            part.default = None
        return part

    def may(self, model_id: str, adapter: str) -> bool:
        """Whether a model of it may be used with this adapter; "" for none."""
        if self._adapters is None:
            return True
        found = self._adapters.get(model_id, frozenset())
        return adapter in found or (bool(adapter) and _ALL in found)

    def _may_any(self, versions: Sequence[ServedModel], adapter: str) -> bool:
        return any(self.may(model.id, adapter) for model in versions)

    def resolve(
        self, name: str | None, path: str | None = None, pick: Pick = operator.itemgetter(0)
    ) -> tuple[ServedModel, str]:
        """The model and the adapter that `name` means: an id or alias, or `id:adapter`, longest id first.

        Without a name, the default model; "" stands for no adapter. path: one that only some models have;
        without a name, it means the only one that has it. pick: one of the versions of a model.
        Raises: ModelNotFound; NotFound when the model does not have `path`; BadRequest when no name is given
        and no model is the default, or when the model takes no adapters.
        """
        if path is not None:
            having = [model for model in self.models.values() if path in model.paths]
            if not name and len({model.name for model in having}) == 1:
                name = having[0].name

            def able(versions: Sequence[ServedModel]) -> ServedModel:
                return pick([model for model in versions if model in having] or versions)

            model, adapter = self.resolve(name, None, able)
            if model not in having:
                others = ", ".join(f"'{other.id}'" for other in having[:_NAMED])
                where = f"; it is a path of {others}" if others else ""
                raise NotFound(f"The model '{model.id}' has no path '{path}'{where}.")
            return model, adapter
        if not name:
            if self.default is None:
                raise BadRequest(f"The request names no model; name one of {self._known()}.", param="model")
            name = self.default
        versions, adapter = self._find(name)
        model = pick(versions) if versions[0].version and name not in versions[0].own_names else versions[0]
        if adapter and not model.adapter_slots:
            raise BadRequest(
                f"Model '{model.id}' takes no adapters, but '{name[:200]}' names one: its config has no "
                f"lora_config. Set lora_config.dynamic_lora_loading_path, or ask for '{model.id}'.",
                param="model",
            )
        return model, adapter

    def find(self, name: str) -> tuple[ServedModel, str]:
        """The parts before and after the colon, longest id or alias first; of a model with versions the first
        one. Raises: ModelNotFound.
        """
        versions, adapter = self._find(name)
        return versions[0], adapter

    def _find(self, name: str) -> tuple[Sequence[ServedModel], str]:
        if len(name) > limits.NAME_CHARS:
            raise ModelNotFound(
                f"The name of the model is longer than {limits.NAME_CHARS} characters. "
                f"Served are {self._known()}.",
                param="model",
            )
        base = name
        while base and base not in self._named:
            base = base.rpartition(":")[0]
        adapter = name[len(base) + 1 :]
        if not base or name == f"{base}:" or not self._may_any(self._named[base], adapter):
            raise self._not_found(name, self._known())
        return self._named[base], adapter

    def show(
        self,
        model: ServedModel,
        adapter: str,
        max_model_len: int | None,
        adapters: Sequence[str],
        name: str | None = None,
    ) -> bytes:
        """JSON of one model, or of one of its `adapters`. name: the alias by which it was asked for.

        Raises: ModelNotFound.
        """
        if adapter and adapter not in adapters:
            known = _some([model.id, *(f"{model.id}:{one}" for one in adapters if self.may(model.id, one))])
            raise self._not_found(f"{model.id}:{adapter}", known)
        return msgspec.json.encode(_shown(model, max_model_len, adapter, name))

    def show_all(
        self, max_model_lens: Mapping[str, int | None], adapters: Mapping[str, Sequence[str]]
    ) -> bytes:
        """JSON of all models in the order of the configuration, each followed by its aliases and adapters. A
        model with versions is shown once.
        """
        shown = [
            _shown(model, max_model_lens.get(model.id), adapter, name)
            for model, *_ in self._public.values()
            for adapter, name in (
                ("", model.name),
                *(("", alias) for alias in model.shared_aliases),
                *((adapter, None) for adapter in adapters.get(model.id, ())),
            )
            if self.may(model.id, adapter)
        ]
        return msgspec.json.encode({"object": "list", "data": shown})

    def _not_found(self, name: str, known: str) -> ModelNotFound:
        return ModelNotFound(
            f"The model '{name[:200]}' is not served here. Served are {known}.", param="model"
        )

    def _known(self) -> str:
        return _some(list(self._named))


def _some(names: Sequence[str]) -> str:
    """For an error."""
    quoted = [f"'{name}'" for name in names]
    rest = f" and {len(names) - _NAMED} more (GET /v1/models)" if len(names) > _NAMED else ""
    return (", ".join(quoted[:_NAMED]) or "none") + rest


def _shown(model: ServedModel, max_model_len: int | None, adapter: str, name: str | None) -> dict[str, Any]:
    """A model in OpenAI's format, with vLLM's additions: the context window, and an adapter's base."""
    return {
        "id": f"{model.name}:{adapter}" if adapter else name or model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "penstock",
        "root": model.name,
        "parent": model.name if adapter else None,
        "max_model_len": max_model_len,
    }
