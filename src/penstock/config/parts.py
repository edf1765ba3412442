"""The parts of an `LLMConfig`, under the names that users know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from penstock.config.part import BRANCH, Part


class ExtraFile(Part):
    """A file beside the weights."""

    bucket_uri: str = Field(description="Where the file is.")
    destination_path: str = Field(description="Where it goes on the replica's node.")


class BucketSource(Part):
    """A model in object storage. Accepted, without effect yet."""

    bucket_uri: str = Field(min_length=1, description="Folder of the model (`s3://...`, `gs://...`).")
    extra_files: list[ExtraFile] = Field(default=[], description="Further files to fetch.")


def _source_kind(value: object) -> str:
    return f"{BRANCH}bucket" if isinstance(value, Mapping | BucketSource) else f"{BRANCH}text"


ModelSource = Annotated[
    Annotated[str, Field(min_length=1), Tag(f"{BRANCH}text")]
    | Annotated[BucketSource, Tag(f"{BRANCH}bucket")],
    Discriminator(_source_kind),
]


class ModelLoadingConfig(Part):
    """Which model, and where it comes from."""

    model_id: str = Field(min_length=1, description="The name that clients use.")
    model_source: ModelSource | None = Field(
        default=None,
        description="Hub id, local folder, or `demo` for the model that ships with Penstock. "
        "Without it, the model_id.",
    )
    tokenizer_source: str | None = Field(
        default=None, min_length=1, description="Hub id or folder of the tokenizer, if not the model's own."
    )


class LoraConfig(Part):
    """Adapters that are loaded on demand. Accepted, without effect yet."""

    dynamic_lora_loading_path: str | None = Field(
        default=None, description="Folder or URI that holds adapters."
    )
    max_num_adapters_per_replica: int = Field(
        default=16, gt=0, description="Adapters in one replica at a time."
    )
    download_timeout_s: float | None = Field(default=None, gt=0, description="Time limit of one download.")
    max_download_tries: int = Field(default=3, gt=0, description="Tries of one download.")


class AcceleratorConfig(Part):
    """What the replica runs on."""

    kind: Literal["cpu", "gpu"] | None = Field(
        default=None, description="`cpu` or `gpu`; without it, decided when the model is deployed."
    )


class PlacementGroupConfig(Part):
    """Resources of the engine's workers, where the computed ones do not fit."""

    bundles: list[dict[str, Annotated[float, Field(ge=0)]]] | None = Field(
        default=None, description="One entry per worker (TP x PP), for example `{GPU: 1, CPU: 1}`."
    )
    bundle_per_worker: dict[str, Annotated[float, Field(ge=0)]] | None = Field(
        default=None, description="The same for every worker; excludes `bundles`."
    )
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        default="PACK",
        description="How bundles lie on nodes. SPREAD and STRICT_SPREAD make the engine span nodes.",
    )

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.bundles is None) == (self.bundle_per_worker is None):
            raise ValueError("give either `bundles` or `bundle_per_worker`.")
        return self


class CallbackConfig(Part):
    """Hooks around the start of a replica. Accepted, without effect yet."""

    callback_class: Any = Field(default=None, description="Class or its import path.")
    callback_kwargs: dict[str, Any] = Field(default={}, description="Arguments of the class.")
    raise_error_on_callback: bool = Field(default=True, description="Whether a failing hook stops the start.")


class ExperimentalConfigs(Part):
    """Options that may change."""

    stream_batching_interval_ms: float = Field(
        default=0,
        ge=0,
        description="Streamed events are joined over this time, in milliseconds; the first is never held.",
    )


class EngineSizes(Part):
    """What placement reads from `engine_kwargs`; all other names are the engine's to check."""

    model_config = ConfigDict(extra="allow")

    tensor_parallel_size: int | None = Field(default=None, ge=1)
    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    prefill_context_parallel_size: int | None = Field(default=None, ge=1)
    data_parallel_size: int | None = Field(default=None, ge=1)
    data_parallel_size_local: int | None = Field(default=None, ge=0)
