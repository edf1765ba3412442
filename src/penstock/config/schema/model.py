"""`LLMConfig`: what users say about one model. It describes; it never downloads, starts or asks anything.

Field names are those that users know from the mission documents. What follows from a config
(Serve's options, bundles, the accelerator) is computed by functions in `derive`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast, get_args

from pydantic import Field, PrivateAttr, field_validator, model_validator

from penstock.config.messages.location import Location
from penstock.config.messages.problems import CheckedDict, unknown
from penstock.config.schema.deployment import Environment, ReplicaDeployment
from penstock.config.schema.env_vars import layered
from penstock.config.schema.prefill import OVERRIDES, PrefillConfig
from penstock.config.schema.processing import (
    ClassOrPath,
    Hook,
    OwnPreprocessor,
    PostprocessorOptions,
)
from penstock.config.schema.request_router import is_ours, prefix_options, router_class, router_name
from penstock.config.schema.routing import DEFAULT_POLICY, Policy, RoutingConfig
from penstock.config.schema.sections import (
    AcceleratorConfig,
    BatchConfig,
    BucketSource,
    CallbackConfig,
    EngineArguments,
    EngineSizes,
    ExperimentalConfigs,
    LoraConfig,
    ModelLoadingConfig,
    Nodes,
    OnDemandConfig,
    PlacementGroup,
    SloConfig,
    translate_task,
)
from penstock.config.schema.strict import RootConfig, optional, section, setting
from penstock.config.schema.versions import (
    Canary,
    Shadow,
    Sticky,
    VersionConfig,
    VersionEntry,
    own_fields,
)

_MODEL = "a config does not read the model. Its folder has a config.json; a running service has /v1/models."
_CONNECTOR = "set engine_kwargs.kv_transfer_config, or `prefill`; a replica sets its connector up."
ELSEWHERE = {
    "apply_checkpoint_info": _MODEL,
    "input_modality": _MODEL,
    "model_architecture": _MODEL,
    "supports_vision": _MODEL,
    "multiplex_config": "the limits of adapters are in `lora_config`.",
    "get_or_create_callback": "a replica makes the callback; name its class in `callback_config`.",
    "kv_connector_backend": _CONNECTOR,
    "setup_engine_backend": _CONNECTOR,
}
"""Attributes of `ray.serve.llm.LLMConfig` that are not here, and what to use."""


@dataclass(slots=True)
class EngineConfig:
    """Of one model: its name, its hub id or folder, its engine's arguments."""

    model_id: str
    hf_model_id: str
    engine_kwargs: dict[str, Any]


DEMO_MODEL_ID = "penstock-demo"
DEMO_SOURCE = "demo"

EngineName = Literal["vllm", "sglang", "sim", "process"]
_ENGINES: tuple[EngineName, ...] = get_args(EngineName)


class LLMConfig(RootConfig):
    """One model: its source, its engine, its placement, its deployment.

    Raises: ConfigError with every fault at once.
    """

    model_loading_config: ModelLoadingConfig = Field(description="Which model.")
    aliases: list[Annotated[str, Field(min_length=1, max_length=512)]] = setting(
        [], "More names that clients may use for it. See docs/serve/names.md."
    )
    fallbacks: list[Annotated[str, Field(min_length=1)]] = setting(
        [], "Models behind the same gateway that answer when this one cannot, in this order."
    )
    versions: list[Annotated[dict[str, Any], CheckedDict(VersionEntry)]] = setting(
        [],
        "Versions side by side, which share the model's requests by their weights: each a `name`, a "
        "`weight`, and fields of this config that it has otherwise. See docs/operate/model-versions.md.",
    )
    sticky: Sticky = setting(
        "none", "Which requests stay with one version: those of a `user`, or of a `session`."
    )
    shadow: Shadow | None = optional(
        "The version that answers some requests for the others as well, unseen by clients: its name, or a "
        "section."
    )
    canary: Canary | None = optional(
        "The version whose share grows by steps while it does as well as the others, and which gets none "
        "when it does not: its name, or a section."
    )
    version: VersionConfig | None = optional("Written for each of `versions`, not by users.")
    llm_engine: str = setting(
        "vllm",
        "`vllm`, `sglang`, `process` (any program that speaks OpenAI HTTP) or `sim` (a "
        "simulator), see docs/serve/engines.md; case does not matter.",
    )
    engine_kwargs: EngineArguments = setting(
        {}, "Arguments of the engine, under the names that the engine gives them."
    )
    accelerator_type: str | None = optional("Ray's name of the GPU type (A10G, L4, H100, ...).", min_length=1)
    accelerator_config: AcceleratorConfig | None = optional("CPU or GPU.")
    deployment_config: ReplicaDeployment = setting({}, "Options of Ray Serve's deployment.")
    routing_policy: Policy = setting(
        DEFAULT_POLICY,
        "Which replica gets a request: `prefix_affinity`, `session_affinity`, "
        "`adapter_affinity`, `least_loaded`, `power_of_two`, `round_robin`, or an own class, "
        "`my_module:MyPolicy`.",
    )
    routing_config: RoutingConfig = section(RoutingConfig, "Options of the policy.")
    slo: SloConfig | None = optional(
        "What online requests may take while batch runs beside them. See docs/operate/one-fleet.md."
    )
    batch: BatchConfig | None = optional("Batch requests (`service_tier: flex`).")
    lora_config: LoraConfig | None = optional("Adapters.")
    on_demand: OnDemandConfig | None = optional("Taking turns with other models on the same memory.")
    prefill: PrefillConfig | None = optional(
        "Replicas that only compute long prompts. See docs/serve/prefill.md."
    )
    placement_group_config: PlacementGroup | None = optional("Workers' resources.")
    runtime_env: Environment | None = optional("Ray's runtime environment of the replica.")
    log_engine_metrics: bool = setting(True, "Whether /metrics has the engine's numbers.")
    server_cls: ClassOrPath = optional("Own server class, or its import path `package.module:Class`.")
    preprocessor: Hook = optional(
        "Your own code before the engine: a class, a function or its path `my_module:Name`. "
        "See docs/serve/preprocessing.md."
    )
    preprocessor_options: OwnPreprocessor | None = optional(
        "Options of its own deployment; without any, or with `arguments` alone, it runs in the replica."
    )
    postprocessor: Hook = optional("Your own code after the engine, named in the same way.")
    postprocessor_options: Annotated[dict[str, Any], CheckedDict(PostprocessorOptions)] | None = optional(
        "Its arguments."
    )
    callback_config: CallbackConfig = section(CallbackConfig, "Hooks at the start.")
    experimental_configs: Annotated[dict[str, Any], CheckedDict(ExperimentalConfigs)] = setting(
        {}, "Options that may change."
    )
    engine_start_timeout_s: float = setting(
        1800.0,
        "Time limit of the engine's start. Half an hour reads 140 GB of weights at 100 MB/s; "
        "it is there for starts that hang.",
        gt=0,
    )

    _engine: EngineConfig | None = PrivateAttr(default=None)

    @field_validator("aliases", "fallbacks")
    @classmethod
    def _each_once(cls, names: list[str]) -> list[str]:
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"names {', '.join(map(repr, twice))} more than once.")
        return names

    @field_validator("versions")
    @classmethod
    def _can_be_told_apart(cls, versions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        cls._each_once([one["name"] for one in versions])
        plain = [one["name"] for one in versions if not own_fields(one)]
        if len(plain) > 1:
            raise ValueError(
                f"{plain[0]!r} and {plain[1]!r} are the same: give one of them a field of its own."
            )
        if versions and not any(one.get("weight", 1) for one in versions):
            raise ValueError("all weights are 0: no version would answer.")
        return versions

    if not TYPE_CHECKING:  # to a type checker, an unknown attribute stays an error

        def __getattr__(self, name: str) -> Any:
            """Names that users may know, and what there is instead."""
            if name in ELSEWHERE:
                raise AttributeError(f"LLMConfig has no '{name}': {ELSEWHERE[name]}")
            return super().__getattr__(name)

    @field_validator("llm_engine")
    @classmethod
    def _known_engine(cls, name: str) -> str:
        if name.lower() not in _ENGINES:
            raise ValueError(unknown("engine", name, _ENGINES))
        return name

    @model_validator(mode="after")
    def _fields_fit_together(self) -> Self:
        self._translate_tasks()
        for sentence in self._contradictions():
            raise ValueError(sentence)
        return self

    def _translate_tasks(self) -> None:
        if self.engine_name == "vllm":
            for kwargs in (self.engine_kwargs, self.prefill.engine_kwargs if self.prefill else {}):
                translate_task(kwargs)

    def _contradictions(self) -> Iterator[str]:
        for field in ("preprocessor", "postprocessor"):
            if getattr(self, f"{field}_options") is not None and getattr(self, field) is None:
                yield f"{field}_options are given, but no {field}."
        if self.sticky != "none" and not self.versions:
            yield "sticky is given, but no versions."
        weights = {one["name"]: one.get("weight", 1) for one in self.versions}
        for field, part in (("canary", self.canary), ("shadow", self.shadow)):
            if part is not None and part.version not in weights:
                yield f"{field}: {unknown('version', part.version, weights)}"
        if self.canary is not None and not any(weights[one] for one in weights if one != self.canary.version):
            yield "canary: there is no other version with a weight that it could be compared with."
        router = router_name(self.deployment_config.get("request_router_config"))
        if router is not None and self.routing_policy != DEFAULT_POLICY:
            yield (
                f"deployment_config.request_router_config names {router}, but routing_policy is "
                f"{self.routing_policy!r}; keep the latter."
            )
        if self.accelerator_type is not None and self.bundles_have_gpus is False:
            yield (
                f"accelerator_type is {self.accelerator_type!r}, but no bundle of placement_group_config "
                "has a GPU; give the bundles GPUs, or leave accelerator_type out."
            )
        if self.prefill is not None and self.engine_name != "vllm":
            yield f"prefill: needs the engine 'vllm', not {self.engine_name!r}."
        if self.prefill is not None and self.on_demand is not None:
            yield "prefill and on_demand exclude each other: give one of them."
        needs = {
            "slo.itl_ms": self.slo and self.slo.itl_ms,
            "batch.min_share": self.batch and self.batch.min_share,
        }
        given = [name for name, value in needs.items() if value]
        if given and self.engine_name not in ("vllm", "sim"):
            yield (
                f"{given[0]} has no effect with the engine {self.engine_name!r}, which reports neither its "
                "steps nor its seats; leave it out."
            )

    @property
    def location(self) -> Location:
        """Where this config was read; for one built in Python, its model's name."""
        return self._location if str(self._location) else Location(f"model {self.model_id!r}")

    @property
    def model_id(self) -> str:
        """The name that clients use."""
        return self.model_loading_config.model_id

    @property
    def model_source(self) -> str:
        """Hub id, folder or URI; for `demo`, the folder of the model that ships with Penstock."""
        source = self.model_loading_config.model_source
        if isinstance(source, BucketSource):
            return source.bucket_uri
        if source == DEMO_SOURCE or (source is None and self.model_id == DEMO_MODEL_ID):
            import penstock  # here, because the package root imports this room

            return str(penstock.demo_model())
        return source or self.model_id

    @property
    def engine_name(self) -> EngineName:
        """`llm_engine` in the one spelling that code compares with."""
        return cast("EngineName", self.llm_engine.lower())

    @property
    def serve_router(self) -> Any:
        """A router class of Ray Serve's kind, or its import path; None where the gateway's policy picks."""
        router = router_class(self.deployment_config.get("request_router_config"))
        return None if router is None or is_ours(router) else router

    @property
    def policy_options(self) -> dict[str, Any]:
        """Arguments of the routing policy."""
        given = self.deployment_config.get("request_router_config")
        return {} if self.serve_router is not None else prefix_options(given)

    @property
    def bundles_have_gpus(self) -> bool | None:
        """Whether placement_group_config has a bundle with GPUs; None without that config."""
        group = self.placement_group_config
        bundles: Any = group and (group.get("bundles") or [group.get("bundle_per_worker") or {}])
        return bundles and any(bundle.get("GPU") for bundle in bundles)

    @property
    def ingress_replicas(self) -> int:
        """Gateways that this model asks for."""
        return int(self.experimental_configs.get("num_ingress_replicas", 1))

    @property
    def max_request_context_length(self) -> int | None:
        """`max_model_len` of the engine, where the config says it. Units: tokens."""
        return self.engine_kwargs.get("max_model_len")

    def get_engine_config(self) -> EngineConfig:
        """What the engine is told. A callback that changes it, changes what starts; one for each config."""
        if self._engine is None:
            self._engine = EngineConfig(self.model_id, self.model_source, self.engine_kwargs)
        return self._engine

    def update_engine_kwargs(self, **arguments: Any) -> None:
        """Adds engine arguments, or replaces some. Before the config is bound, or in a callback.

        Raises: ConfigError.
        """
        EngineSizes.parse({**self.engine_kwargs, **arguments}, self.location / "engine_kwargs")
        self.engine_kwargs.update(arguments)
        self._translate_tasks()

    def add_aliases(self, names: Iterable[str]) -> None:
        """Adds names that a gateway knows; engines look `aliases` up for each request."""
        self.aliases.extend(name for name in names if name not in self.aliases)

    @property
    def stream_batching_interval_ms(self) -> float:
        """Milliseconds over which streamed events are joined; 0 by default."""
        return float(self.experimental_configs.get("stream_batching_interval_ms", 0))

    def get_serve_options(
        self,
        name_prefix: str | None = None,
        *,
        nodes: Nodes | None = None,
        default_runtime_env: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Keyword arguments for `serve.deployment(...).options(...)`.

        nodes: resources of each node of the cluster, where they are known.
        Raises: ConfigError when the placement cannot work.
        """
        # What follows from a config imports it: this, which users call as a method, is imported when called.
        derive = importlib.import_module("penstock.config.derive.serve_options")
        return derive.serve_options(self, name_prefix, nodes, default_runtime_env)

    @property
    def canonical(self) -> Self:
        """The same model, without a `model_source` that only repeats the model_id."""
        repeats = self.model_loading_config.model_source == self.model_id
        is_demo = self.model_id in (DEMO_SOURCE, DEMO_MODEL_ID)
        return self.with_source(None) if repeats and not is_demo else self

    def with_source(self, source: str | None) -> Self:
        """The same config with another `model_source`."""
        loading = self.model_loading_config.model_copy(update={"model_source": source})
        return self.model_copy(update={"model_loading_config": loading})

    def with_prefill(self, half: LLMConfig) -> Self:
        """The same config, whose long prompts are computed by replicas of the config `half`.

        Raises: ConfigError when it is another model.
        """
        if (half.model_id, half.engine_name) != (self.model_id, self.engine_name):
            raise half.location.fault(
                f"prefill and decode must be one model on one engine, not {half.model_id!r} on "
                f"{half.engine_name!r} and {self.model_id!r} on {self.engine_name!r}."
            )
        prefill = PrefillConfig.parse({name: getattr(half, name) for name in OVERRIDES}, half.location)
        return self.model_copy(update={"prefill": prefill})

    def with_secrets(self, variables: Mapping[str, str]) -> Self:
        """The same config, carrying these variables to the replica: no option that Serve shows has them."""
        carried = layered(self.runtime_env, {"env_vars": variables})
        return self.model_copy(update={"runtime_env": carried}) if variables else self
