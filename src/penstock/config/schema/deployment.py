"""What `deployment_config` may hold: the options of `ray.serve.deployment`, by name and by value.

The tables are ours so that a config can be checked without importing Ray; a test compares them with the
signature of the installed Ray. The dict that the user wrote goes to Serve as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from penstock.config.messages.annotations import CheckedDict
from penstock.config.messages.location import Location
from penstock.config.messages.problems import translated
from penstock.config.schema.request_router import RequestRouterOptions
from penstock.config.schema.strict import StrictModel

_PLACEMENT = (
    "must not be set in deployment_config; set `placement_group_config` of the LLMConfig, "
    "from which Serve's bundles are computed."
)


def _refused(sentence: str) -> Any:
    def refuse(value: object) -> object:
        raise ValueError(sentence)

    return BeforeValidator(refuse)


def _auto(value: object) -> object:
    """`num_replicas: auto` fixes no number, so it needs no check and goes with an autoscaling_config."""
    return None if value == "auto" else value


class AutoscalingOptions(StrictModel):
    """Serve's `AutoscalingConfig`."""

    min_replicas: int = Field(
        default=1, ge=0, description="Replicas that are always there; 0 lets a model sleep."
    )
    initial_replicas: int | None = Field(default=None, ge=0, description="Replicas at the start.")
    max_replicas: int = Field(default=1, gt=0, description="Replicas at most.")
    target_ongoing_requests: float | None = Field(
        default=2, gt=0, description="Requests per replica to aim at."
    )
    metrics_interval_s: float = Field(default=10.0, gt=0, description="How often replicas report.")
    look_back_period_s: float = Field(default=30.0, gt=0, description="Time over which reports are averaged.")
    smoothing_factor: float = Field(default=1.0, gt=0, description="Deprecated by Serve.")
    upscale_smoothing_factor: float | None = Field(default=None, gt=0, description="Deprecated by Serve.")
    downscale_smoothing_factor: float | None = Field(default=None, gt=0, description="Deprecated by Serve.")
    upscaling_factor: float | None = Field(default=None, gt=0, description="Gain of a decision upwards.")
    downscaling_factor: float | None = Field(default=None, gt=0, description="Gain of a decision downwards.")
    downscale_delay_s: float = Field(default=600.0, ge=0, description="Wait before a replica is taken away.")
    downscale_to_zero_delay_s: float | None = Field(
        default=None, ge=0, description="Wait before the last goes."
    )
    upscale_delay_s: float = Field(default=30.0, ge=0, description="Wait before a replica is added.")
    aggregation_function: Literal["mean", "max", "min"] = Field(default="mean", description="Over the time.")
    policy: Any = Field(default=None, description="Serve's `AutoscalingPolicy`.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas ({self.max_replicas}) must not be below min_replicas ({self.min_replicas})."
            )
        initial = self.initial_replicas
        if initial is not None and not self.min_replicas <= initial <= self.max_replicas:
            raise ValueError(
                f"initial_replicas ({initial}) must lie between min_replicas ({self.min_replicas}) "
                f"and max_replicas ({self.max_replicas})."
            )
        return self


class RuntimeEnv(StrictModel):
    """Ray's `runtime_env`: what a node is given before a replica's process starts there."""

    env_vars: dict[str, str] = Field(
        default={},
        description="Environment variables; merged key by key. `${NAME}`: the value that NAME has "
        "where the config is read.",
    )
    working_dir: str | None = Field(
        default=None,
        description="Folder, the same on every node, or URI of an archive: it becomes the working directory.",
    )
    py_modules: list[Any] | None = Field(
        default=None, description="Python modules: folders that are on every node, or URIs of archives."
    )
    py_executable: str | None = Field(default=None, description="The Python to run.")
    excludes: list[str] | None = Field(default=None, description="Files of working_dir to leave out.")
    pip: Any = Field(default=None, description="Packages to install with pip.")
    uv: Any = Field(default=None, description="Packages to install with uv.")
    conda: Any = Field(default=None, description="Conda environment.")
    image_uri: str | None = Field(default=None, description="Container image.")
    container: Any = Field(default=None, description="Container; Ray prefers image_uri.")
    java_jars: list[str] | None = Field(default=None, description="For Ray's Java workers.")
    config: Any = Field(default=None, description="Ray's `RuntimeEnvConfig` (set-up time limit, ...).")
    worker_process_setup_hook: Any = Field(
        default=None, description="Function to call as the process starts."
    )
    nsight: Any = Field(default=None, description="Profile with Nsight.")
    rocprof_sys: Any = Field(default=None, description="Profile with rocprof-sys.")


class ActorOptions(StrictModel):
    """What Serve allows in `ray_actor_options`."""

    num_cpus: float | None = Field(default=None, ge=0, description="CPUs of the replica's own actor.")
    num_gpus: float | None = Field(default=None, ge=0, description="GPUs of the replica's own actor.")
    memory: float | None = Field(default=None, ge=0, description="Heap memory, in bytes.")
    resources: dict[str, float] = Field(default={}, description="Custom resources.")
    runtime_env: Annotated[dict[str, Any], CheckedDict(RuntimeEnv)] = Field(
        default={}, description="Runs under LLMConfig.runtime_env, which wins key by key."
    )
    label_selector: dict[str, str] | None = Field(default=None, description="Labels that a node must have.")
    fallback_strategy: list[dict[str, Any]] | None = Field(
        default=None, description="Softer label selectors."
    )
    accelerator_type: Annotated[
        str | None, _refused("must not be set in ray_actor_options; set `accelerator_type` of the LLMConfig.")
    ] = Field(default=None, description="Refused: set `accelerator_type` of the LLMConfig.")


class BackpressureOptions(StrictModel):
    """Serve's `BackpressureConfig`."""

    status_code: Literal[503, 429] = Field(default=503, description="Status of a refused request.")
    retry_after_s: float | None = Field(default=None, ge=0, description="Value of Retry-After.")


class GangOptions(StrictModel):
    """Serve's `GangSchedulingConfig`."""

    gang_size: int = Field(ge=1, description="Replicas that start and stop together.")
    gang_placement_strategy: Literal["PACK", "SPREAD"] = Field(default="PACK", description="Over nodes.")
    runtime_failure_policy: Literal["RESTART_GANG", "RESTART_REPLICA"] = Field(
        default="RESTART_GANG", description="What happens when one member dies."
    )


class DeploymentOptions(StrictModel):
    """The options of `ray.serve.deployment`."""

    name: str | None = Field(default=None, min_length=1, description="Name of the deployment.")
    num_replicas: Annotated[int | None, BeforeValidator(_auto)] = Field(
        default=None, ge=1, description='Fixed number of replicas, or "auto".'
    )
    autoscaling_config: Annotated[dict[str, Any], CheckedDict(AutoscalingOptions)] | None = Field(
        default=None, description="Replicas between a minimum and a maximum."
    )
    ray_actor_options: Annotated[dict[str, Any], CheckedDict(ActorOptions)] | None = Field(
        default=None, description="Resources and environment of the replica's own actor."
    )
    max_ongoing_requests: int | None = Field(default=None, gt=0, description="Open requests of one replica.")
    max_queued_requests: int | None = Field(
        default=None, ge=-1, description="Requests waiting in front; -1: no limit."
    )
    backpressure_config: Annotated[dict[str, Any], CheckedDict(BackpressureOptions)] | None = Field(
        default=None, description="How a request over the limit is refused."
    )
    max_replicas_per_node: int | None = Field(
        default=None, ge=1, le=100, description="Replicas on one node at most."
    )
    health_check_period_s: float | None = Field(default=None, gt=0, description="Time between health checks.")
    health_check_timeout_s: float | None = Field(default=None, gt=0, description="Time limit of one check.")
    graceful_shutdown_timeout_s: float | None = Field(
        default=None, ge=0, description="Time to finish open streams."
    )
    graceful_shutdown_wait_loop_s: float | None = Field(
        default=None, ge=0, description="Serve's wait between looks."
    )
    max_constructor_retry_count: int | None = Field(
        default=None, gt=0, description="Tries to start a replica."
    )
    rolling_update_percentage: float | None = Field(
        default=None, gt=0, le=1, description="Share updated at a time."
    )
    max_surge_percent: int | None = Field(
        default=None, ge=0, le=100, description="Extra replicas in an update."
    )
    user_config: Any = Field(default=None, description="Passed to `reconfigure` of an own server class.")
    logging_config: Any = Field(default=None, description="Serve's `LoggingConfig`.")
    request_router_config: Annotated[dict[str, Any], CheckedDict(RequestRouterOptions)] | None = Field(
        default=None, description="How calls by handle are sent."
    )
    gang_scheduling_config: Annotated[dict[str, Any], CheckedDict(GangOptions)] | None = Field(
        default=None, description="Replicas that start and stop together."
    )
    deployment_actors: list[Any] | None = Field(
        default=None, description="Actors that live with the deployment."
    )
    placement_group_bundles: Annotated[Any, _refused(_PLACEMENT)] = Field(
        default=None, description="Refused: set `placement_group_config` of the LLMConfig."
    )
    placement_group_strategy: Annotated[Any, _refused(_PLACEMENT)] = Field(
        default=None, description="Refused: set `placement_group_config` of the LLMConfig."
    )
    placement_group_bundle_label_selector: list[dict[str, str]] | None = Field(
        default=None, description="Labels that the bundles' nodes must have."
    )

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if self.num_replicas is None or self.autoscaling_config is None:
            return self
        raise ValueError("num_replicas and autoscaling_config exclude each other; give one of them.")


def checked_options(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Options of `serve.deployment` that were given as the argument `name`. Raises: ConfigError."""
    with translated(DeploymentOptions, Location(name)):
        DeploymentOptions.model_validate(given)
    return dict(given)
