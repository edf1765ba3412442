"""What `deployment_config` may hold: the options of `ray.serve.deployment`, by name and by value.

The tables are ours so that a config can be checked without importing Ray; a test compares them with the
signature of the installed Ray. The dict that the user wrote goes to Serve as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Optional, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from penstock.config.messages.location import Location
from penstock.config.messages.problems import CheckedDict
from penstock.config.schema.env_vars import with_variables
from penstock.config.schema.request_router import RequestRouterOptions
from penstock.config.schema.strict import StrictModel, optional, setting

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


_Count = Optional[Annotated[int, Field(ge=1)] | Literal["auto"]]  # noqa: UP045 - of values, not of types


class AutoscalingOptions(StrictModel):
    """Serve's `AutoscalingConfig`."""

    min_replicas: int = setting(1, "Replicas that are always there; 0 lets a model sleep.", ge=0)
    initial_replicas: int | None = optional("Replicas at the start.", ge=0)
    max_replicas: int = setting(1, "Replicas at most.", gt=0)
    target_ongoing_requests: float | None = setting(2, "Requests per replica to aim at.", gt=0)
    metrics_interval_s: float = setting(10.0, "How often replicas report.", gt=0)
    look_back_period_s: float = setting(30.0, "Time over which reports are averaged.", gt=0)
    smoothing_factor: float = setting(1.0, "Deprecated by Serve.", gt=0)
    upscale_smoothing_factor: float | None = optional("Deprecated by Serve.", gt=0)
    downscale_smoothing_factor: float | None = optional("Deprecated by Serve.", gt=0)
    upscaling_factor: float | None = optional("Gain of a decision upwards.", gt=0)
    downscaling_factor: float | None = optional("Gain of a decision downwards.", gt=0)
    downscale_delay_s: float = setting(600.0, "Wait before a replica is taken away.", ge=0)
    downscale_to_zero_delay_s: float | None = optional("Wait before the last goes.", ge=0)
    upscale_delay_s: float = setting(30.0, "Wait before a replica is added.", ge=0)
    aggregation_function: Literal["mean", "max", "min"] = setting("mean", "Over the time.")
    policy: Any = optional("Serve's `AutoscalingPolicy`.")

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

    env_vars: dict[str, str] = setting(
        {},
        "Environment variables; merged key by key. `${NAME}`: the value that NAME has "
        "where the config is read.",
    )
    working_dir: str | None = optional(
        "Folder, the same on every node, or URI of an archive: it becomes the working directory."
    )
    py_modules: list[Any] | None = optional(
        "Python modules: folders that are on every node, or URIs of archives."
    )
    py_executable: str | None = optional("The Python to run.")
    excludes: list[str] | None = optional("Files of working_dir to leave out.")
    pip: Any = optional("Packages to install with pip.")
    uv: Any = optional("Packages to install with uv.")
    conda: Any = optional("Conda environment.")
    image_uri: str | None = optional("Container image.")
    container: Any = optional("Container; Ray prefers image_uri.")
    java_jars: list[str] | None = optional("For Ray's Java workers.")
    config: Any = optional("Ray's `RuntimeEnvConfig` (set-up time limit, ...).")
    worker_process_setup_hook: Any = optional("Function to call as the process starts.")
    nsight: Any = optional("Profile with Nsight.")
    rocprof_sys: Any = optional("Profile with rocprof-sys.")


_Checked = Annotated[dict[str, Any], CheckedDict(RuntimeEnv)]
Environment = Annotated[_Checked, AfterValidator(with_variables)]


class ActorOptions(StrictModel):
    """What Serve allows in `ray_actor_options`."""

    num_cpus: float | None = optional("CPUs of the replica's own actor.", ge=0)
    num_gpus: float | None = optional("GPUs of the replica's own actor.", ge=0)
    memory: float | None = optional("Heap memory, in bytes.", ge=0)
    resources: dict[str, float] = setting({}, "Custom resources.")
    runtime_env: _Checked = setting({}, "Runs under LLMConfig.runtime_env, which wins key by key.")
    label_selector: dict[str, str] | None = optional("Labels that a node must have.")
    fallback_strategy: list[dict[str, Any]] | None = optional("Softer label selectors.")
    accelerator_type: Annotated[
        str | None, _refused("must not be set in ray_actor_options; set `accelerator_type` of the LLMConfig.")
    ] = optional("Refused: set `accelerator_type` of the LLMConfig.")


class BackpressureOptions(StrictModel):
    """Serve's `BackpressureConfig`."""

    status_code: Literal[503, 429] = setting(503, "Status of a refused request.")
    retry_after_s: float | None = optional("Value of Retry-After.", ge=0)


class GangOptions(StrictModel):
    """Serve's `GangSchedulingConfig`."""

    gang_size: int = Field(ge=1, description="Replicas that start and stop together.")
    gang_placement_strategy: Literal["PACK", "SPREAD"] = setting("PACK", "Over nodes.")
    runtime_failure_policy: Literal["RESTART_GANG", "RESTART_REPLICA"] = setting(
        "RESTART_GANG", "What happens when one member dies."
    )


Autoscaling = Annotated[dict[str, Any], CheckedDict(AutoscalingOptions)]
Actor = Annotated[dict[str, Any], CheckedDict(ActorOptions)]
Backpressure = Annotated[dict[str, Any], CheckedDict(BackpressureOptions)]
Router = Annotated[dict[str, Any], CheckedDict(RequestRouterOptions)]
GangScheduling = Annotated[dict[str, Any], CheckedDict(GangOptions)]


class DeploymentOptions(StrictModel):
    """The options of `ray.serve.deployment`."""

    name: str | None = optional("Name of the deployment.", min_length=1)
    num_replicas: Annotated[int | None, BeforeValidator(_auto, _Count)] = optional(
        'Fixed number of replicas, or "auto".', ge=1
    )
    autoscaling_config: Autoscaling | None = optional("Replicas between a minimum and a maximum.")
    ray_actor_options: Actor | None = optional("Resources and environment of the replica's own actor.")
    max_ongoing_requests: int | None = optional("Open requests of one replica.", gt=0)
    max_queued_requests: int | None = optional("Requests waiting in front; -1: no limit.", ge=-1)
    backpressure_config: Backpressure | None = optional("How a request over the limit is refused.")
    max_replicas_per_node: int | None = optional("Replicas on one node at most.", ge=1, le=100)
    health_check_period_s: float | None = optional("Time between health checks.", gt=0)
    health_check_timeout_s: float | None = optional("Time limit of one check.", gt=0)
    graceful_shutdown_timeout_s: float | None = optional("Time to finish open streams.", ge=0)
    graceful_shutdown_wait_loop_s: float | None = optional("Serve's wait between looks.", ge=0)
    max_constructor_retry_count: int | None = optional("Tries to start a replica.", gt=0)
    rolling_update_percentage: float | None = optional("Share updated at a time.", gt=0, le=1)
    max_surge_percent: int | None = optional("Extra replicas in an update.", ge=0, le=100)
    user_config: Any = optional("Passed to `reconfigure` of an own server class.")
    logging_config: Any = optional("Serve's `LoggingConfig`.")
    request_router_config: Router | None = optional("How calls by handle are sent.")
    gang_scheduling_config: GangScheduling | None = optional("Replicas that start and stop together.")
    deployment_actors: list[Any] | None = optional("Actors that live with the deployment.")
    placement_group_bundles: Annotated[Any, _refused(_PLACEMENT)] = optional(
        "Refused: set `placement_group_config` of the LLMConfig."
    )
    placement_group_strategy: Annotated[Any, _refused(_PLACEMENT)] = optional(
        "Refused: set `placement_group_config` of the LLMConfig."
    )
    placement_group_bundle_label_selector: list[dict[str, str]] | None = optional(
        "Labels that the bundles' nodes must have."
    )

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if self.num_replicas is None or self.autoscaling_config is None:
            return self
        raise ValueError("num_replicas and autoscaling_config exclude each other; give one of them.")


def with_variables_of_actor(options: dict[str, Any]) -> dict[str, Any]:
    """The same with the variables of its actor's environment. Raises: ValueError as `with_variables`."""
    actor: Mapping[str, Any] = options.get("ray_actor_options") or {}
    if not (environment := actor.get("runtime_env")):
        return options
    return {**options, "ray_actor_options": {**actor, "runtime_env": with_variables(environment)}}


Deployment = Annotated[dict[str, Any], CheckedDict(DeploymentOptions)]
ReplicaDeployment = Annotated[Deployment, AfterValidator(with_variables_of_actor)]
"""Of processes that get secrets past Serve's state, which shows the options of deployments."""


def checked_options(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Options of `serve.deployment` that were given as the argument `name`. Raises: ConfigError."""
    DeploymentOptions.parse(given, Location(name))
    return dict(given)
