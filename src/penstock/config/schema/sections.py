"""The parts of an `LLMConfig`, under the names that users know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, cast

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from penstock.config.messages.problems import BRANCH, CheckedDict, warn_once
from penstock.config.schema.paths import Source
from penstock.config.schema.strict import StrictModel, matching, optional, setting

MODEL_ID = r"^(?=.*\S)[^\x00-\x1f\x7f]+$"
ADAPTER_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}$"
"""One folder's name that file systems take; nothing that leads out of the folder of all adapters."""


AcceleratorKind = Literal["cpu", "gpu"]

Nodes = Sequence[Mapping[str, float]]
"""Resources of each node of a cluster, as Ray names them."""


class ExtraFile(StrictModel):
    """A file or folder from elsewhere."""

    bucket_uri: Source = Field(description="Where it is: any source.")
    destination_path: str = Field(
        min_length=1, description="Where it goes: a path within the model's folder, or an absolute one."
    )


class BucketSource(StrictModel):
    """A model from a mirror, with further files."""

    bucket_uri: Source = Field(description="Folder of the model: any source.")
    extra_files: list[ExtraFile] = setting([], "What is fetched besides.")

    @property
    def storage_type(self) -> str:
        """`s3`, `gcs`, or the URI's own scheme."""
        scheme = self.bucket_uri.partition("://")[0]
        return "gcs" if scheme == "gs" else scheme


def _source_kind(value: object) -> str:
    return f"{BRANCH}bucket" if isinstance(value, Mapping | BucketSource) else f"{BRANCH}text"


ModelSource = Annotated[
    Annotated[Source, Tag(f"{BRANCH}text")] | Annotated[BucketSource, Tag(f"{BRANCH}bucket")],
    Discriminator(_source_kind),
]


class ModelLoadingConfig(StrictModel):
    """Which model, and where it comes from."""

    model_id: Annotated[str, *matching(MODEL_ID, "a name of printable characters")] = Field(
        description="The name that clients use."
    )
    model_source: ModelSource | None = optional(
        "Hub id, local folder, `s3://`, `gs://` or any URL that fsspec knows; `demo` for the "
        "model that ships with Penstock. `./` and `../` in a file count from its folder. Without it, the "
        "model_id. See docs/serve/sources.md."
    )
    tokenizer_source: ModelSource | None = optional(
        "The same for the tokenizer, if it is not the model's own."
    )


AdapterName = Annotated[
    str,
    *matching(
        ADAPTER_NAME,
        "at most 200 letters, digits, underscores, dots and dashes, not with a dot or dash first",
    ),
]


class LoraConfig(StrictModel):
    """Adapters that are loaded on demand: clients name one as `MODEL_ID:ADAPTER`."""

    dynamic_lora_loading_path: Source | None = optional(
        "Folder or URL (`s3://`, `gs://`, any that fsspec knows) with a folder for each adapter, "
        "named as the adapter."
    )
    adapters: dict[AdapterName, Source] = setting(
        {}, "Sources of further adapters by name: hub ids, folders, URLs."
    )
    pinned: list[AdapterName] = setting([], "Loaded before the replica is ready, and never evicted.")
    refresh_interval_s: float | None = setting(
        30.0, "How often sources of loaded adapters are looked at for a change; `null` for never.", gt=0
    )
    max_num_adapters_per_replica: int = setting(16, "Adapters in one replica at a time.", gt=0)
    download_timeout_s: float | None = optional("Time limit of one download.", gt=0)
    max_download_tries: int = setting(3, "Tries of one download.", gt=0)

    @model_validator(mode="after")
    def _pins_fit(self) -> Self:
        if len(self.pinned) > self.max_num_adapters_per_replica:
            raise ValueError(
                f"pins {len(self.pinned)} adapters where max_num_adapters_per_replica is "
                f"{self.max_num_adapters_per_replica}; raise it, or pin fewer."
            )
        if self.dynamic_lora_loading_path is None and (lost := set(self.pinned) - self.adapters.keys()):
            raise ValueError(
                f"pins {', '.join(sorted(lost))}, but says of no source: name it in `adapters`, "
                "or set `dynamic_lora_loading_path`."
            )
        return self


class AcceleratorConfig(StrictModel):
    """What the replica runs on."""

    kind: Literal["cpu", "gpu"] | None = optional(
        "`cpu` or `gpu`; without it, decided when the model is deployed."
    )


class PlacementGroupConfig(StrictModel):
    """Resources of the engine's workers, where the computed ones do not fit."""

    bundles: list[dict[str, Annotated[float, Field(ge=0)]]] | None = optional(
        "One entry per worker (TP x PP), for example `{GPU: 1, CPU: 1}`.", min_length=1
    )
    bundle_per_worker: dict[str, Annotated[float, Field(ge=0)]] | None = optional(
        "The same for every worker; excludes `bundles`."
    )
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = setting(
        "PACK", "How bundles lie on nodes. SPREAD and STRICT_SPREAD make the engine span nodes."
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.bundles is None) == (self.bundle_per_worker is None):
            raise ValueError("give either `bundles` or `bundle_per_worker`.")
        return self


PlacementGroup = Annotated[dict[str, Any], CheckedDict(PlacementGroupConfig)]


class CallbackConfig(StrictModel):
    """Your own steps around the preparation of a replica's node."""

    callback_class: Any = optional(
        "A subclass of `penstock.serve.CallbackBase`, or its import path `package.module:Class`."
    )
    callback_kwargs: dict[str, Any] = setting({}, "Arguments of the class.")
    raise_error_on_callback: bool = setting(
        True, "Whether a failing step stops the start; else it is logged."
    )


_RAYS_OWN = {
    *("NIXL_SIDE_CHANNEL_PORT_BASE", "MORI_HANDSHAKE_PORT_BASE", "MORI_NOTIFY_PORT_BASE"),
    *("KV_EVENTS_PORT_BASE", "KV_TOKEN_PORT_BASE", "KV_INDEXER_THREADS"),
    *("pd_tokenize_once", "_prewarm_prefill_decode"),
}
"""Keys of `experimental_configs` that Ray Serve LLM reads."""


class ExperimentalConfigs(StrictModel):
    """Options that may change."""

    @model_validator(mode="before")
    @classmethod
    def _without_rays_own(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and (idle := sorted(_RAYS_OWN & given.keys())):
            warn_once(f"experimental_configs: no effect here of {', '.join(idle)}, which only Ray reads.")
            return {name: given[name] for name in given.keys() - _RAYS_OWN}
        return cast("Any", given)

    stream_batching_interval_ms: float = setting(
        0, "Streamed events are joined over this time, in milliseconds; the first is never held.", ge=0
    )
    num_ingress_replicas: int = setting(
        1, "Gateways; the largest number of all models counts, and `gateway.processes`.", ge=1, le=64
    )
    dp_size_per_node: int | None = optional(
        "Replicas of a `data_parallel_size` on one node: all of them (PACK), or fewer (SPREAD).", ge=1
    )


TASKS: Mapping[str, Mapping[str, str]] = {
    "auto": {},
    "generate": {"runner": "generate"},
    "transcription": {"runner": "generate"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling"},
    "reward": {"runner": "pooling"},
}
"""vLLM's `task`, an argument that it dropped, by its value: the arguments in its place."""


def translate_task(engine_kwargs: dict[str, Any]) -> None:
    """Replaces `task` among vLLM's arguments, in place; other values are left to be refused."""
    task = engine_kwargs.get("task")
    if isinstance(task, str) and task in TASKS:
        found = TASKS[task]
        warn_once(f"engine_kwargs: vLLM has no `task` any more; {task!r} is taken as {found or 'nothing'}.")
        del engine_kwargs["task"]
        engine_kwargs.update({**found, **engine_kwargs})


class EngineSizes(StrictModel):
    """What placement reads from `engine_kwargs`; all other names are the engine's to check."""

    model_config = ConfigDict(extra="allow")

    tensor_parallel_size: int | None = Field(default=None, ge=1)
    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    prefill_context_parallel_size: int | None = Field(default=None, ge=1)
    data_parallel_size: int | None = Field(default=None, ge=1)


EngineArguments = Annotated[dict[str, Any], CheckedDict(EngineSizes)]


class SloConfig(StrictModel):
    """Targets of online requests, in the replica: batch gets what they leave."""

    ttft_ms: float | None = optional(
        "Milliseconds to the first token; without it, 10 % above what they take without batch.", gt=0
    )
    itl_ms: float | None = optional(
        "Milliseconds between two tokens; without it, 10 % above what they take without batch.", gt=0
    )


class BatchConfig(StrictModel):
    """Limits of batch requests."""

    min_share: float = setting(
        0.0,
        "Share of an engine's seats that batch has even when online requests miss their targets.",
        ge=0,
        le=1,
    )
    max_queued_requests: int = setting(
        1000, "Batch requests that wait in one gateway for a replica; the next one is a 429.", ge=0
    )


class OnDemandConfig(StrictModel):
    """Models of a group take turns: a request wakes its model, the one unused for longest goes to sleep."""

    group: str = setting("default", "Models of the same group take turns.", min_length=1)
    awake: int = setting(1, "Models of the group that are awake at the same time.", ge=1)
    min_awake_s: float = setting(
        5.0, "How long a model stays awake before another one may take its turn.", ge=0
    )
