"""Configs of processors: which engines, how many, which limits. Pure description.

Field names are those of Ray Data's LLM processors. Those that name one model and start its engines are in
`model_configs`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from penstock.config import LLMConfig
from penstock.config.schema.strict import RootConfig, optional, setting
from penstock.data.execution.retry import RetryPolicy
from penstock.data.pipeline.ray_stages import Concurrency, HttpRequestStageConfig

TaskName = Literal["generate", "embed", "classify", "score"]


class ProcessorConfig(RootConfig):
    """Fields of all processors."""

    batch_size: int = setting(
        64,
        "Rows per batch of Ray Data, of which an actor holds up to 128: smaller for large rows. "
        "The engine takes them one by one.",
        ge=1,
    )
    concurrency: Concurrency = setting(
        1, "Engines, all started at once; `(m, n)`: from m to n of them, by demand."
    )
    accelerator_type: str | None = optional(
        "Ray's name of the GPU type (A10G, L4, H100, ...) of the nodes it runs on."
    )
    task_type: TaskName = setting("generate", "`generate`, `embed`, `classify` or `score`.")
    should_continue_on_error: bool = setting(
        True,
        "Failed rows pass through with `error` set. False: the first one ends the pipeline. "
        "Where it is set to True, every row also has `__inference_error__`, a text, empty if it is ok.",
    )
    max_attempts: int = setting(
        3, "Tries until a temporary error fails a row; 429 and 503 do not count.", ge=1
    )
    max_deaths: int = setting(3, "Engine deaths while they ran a row, until the row fails.", ge=2)
    row_deadline_s: float | None = optional("For one row, over all its tries.", gt=0)
    outage_s: float = setting(300.0, "Without a reachable engine, until the pipeline ends.", gt=0)
    read_files: bool = setting(
        True,
        "Whether media that rows name by path or bucket are read here. Set False for untrusted "
        "rows, which could otherwise read this cluster's files.",
    )
    journal: str | None = optional(
        "Folder or bucket URL where each answer is stored as it arrives. The same pipeline, run "
        "again, reuses them."
    )

    @property
    def rows_per_batch(self) -> int:
        return self.batch_size

    @property
    def actors(self) -> int | tuple[int, int]:
        """The pool's size, or its least and greatest."""
        return self.concurrency

    def get_concurrency(self, autoscaling_enabled: bool = True) -> dict[str, int]:
        """Sizes of the pool of actors: `min_size` and `max_size`.

        autoscaling_enabled: False gives a fixed pool as `size`.
        """
        given = self.actors
        if isinstance(given, int) and not autoscaling_enabled:
            return {"size": given}
        least, most = given if isinstance(given, tuple) else (given, given)
        return {"min_size": least, "max_size": most}

    @property
    def names_failures(self) -> bool:
        """Whether rows get `__inference_error__`, as those of Ray's processors do where this is set."""
        return self.should_continue_on_error and "should_continue_on_error" in self.model_fields_set

    @property
    def retry_policy(self) -> RetryPolicy:
        return RetryPolicy(self.max_attempts, self.max_deaths, self.row_deadline_s, self.outage_s)


class EngineProcessorConfig(ProcessorConfig):
    """Engines started by the pipeline, from the same config as for serving: vLLM, SGLang or the simulator."""

    llm_config: LLMConfig = Field(description="Model, engine and its resources.")

    @model_validator(mode="after")
    def _one_accelerator(self) -> Self:
        if self.accelerator_type is not None:
            raise ValueError("accelerator_type belongs into llm_config here, with the engine's resources")
        return self


class ServeDeploymentProcessorConfig(ProcessorConfig):
    """A running Ray Serve deployment, shared with its other clients.

    Rows name a method (`method`, `request_kwargs`, `dtype`); for a Penstock model they may also be requests.
    """

    app_name: str = setting("default", "Ray Serve's application.")
    deployment_name: str | None = optional("Its deployment; required if it has several.")
    dtype_mapping: dict[str, Any] | None = optional(
        "Classes by the name in a row's `dtype`; its `request_kwargs` are their arguments."
    )
    request_timeout_s: float | None = optional(
        "For one try of a row; after it the row is tried again, see max_attempts.", gt=0
    )
    max_in_flight: int = setting(256, "Maximum parallel calls per actor of the pipeline.", ge=1)


class HttpRequestProcessorConfig(ProcessorConfig):
    """Any OpenAI-compatible URL.

    A row with `payload` is posted as it is to exactly this URL, and gets `http_response`. Other rows are
    requests, as for engines, and the URL is the base of the service (`https://host/v1`).
    """

    url: str = Field(min_length=1, description="Whole URL for payloads, base URL for requests.")
    model: str | None = optional("For requests without a model.")
    headers: dict[str, str] | None = optional("Sent with every request.")
    api_key: str | None = optional("Sent as a bearer token.")
    qps: float | None = optional(
        "Maximum requests per second of the whole pipeline, divided among its actors (`concurrency`).", gt=0
    )
    max_retries: int | None = optional("Older form of max_attempts, minus 1.", ge=0)
    base_retry_wait_time_in_s: float = setting(1.0, "Seconds before the second try.", gt=0)
    timeout_s: float = setting(600.0, "For one try.", gt=0)
    max_in_flight: int = setting(64, "Maximum parallel requests per actor of the pipeline.", ge=1)
    session_factory: Callable[[], Any] | None = optional(
        "Makes the `aiohttp.ClientSession` of an actor: proxies, certificates, a connector of "
        "your own. Its own timeout, headers and cookies count; `timeout_s` does not.",
        repr=False,
    )
    http_request_stage: HttpRequestStageConfig | None = optional(
        "`concurrency`, `batch_size` and resources of the actors that send requests."
    )

    @property
    def rows_per_batch(self) -> int:
        return (self.http_request_stage and self.http_request_stage.batch_size) or self.batch_size

    @property
    def actors(self) -> int | tuple[int, int]:
        return (self.http_request_stage and self.http_request_stage.concurrency) or self.concurrency

    @model_validator(mode="after")
    def _sends_requests(self) -> Self:
        stage = self.http_request_stage
        if stage is not None and not stage.enabled:
            raise ValueError("http_request_stage.enabled is False, but sending requests is all this does")
        return self

    @property
    def retry_policy(self) -> RetryPolicy:
        attempts = self.max_attempts if self.max_retries is None else self.max_retries + 1
        pause_s = self.base_retry_wait_time_in_s
        return RetryPolicy(attempts, self.max_deaths, self.row_deadline_s, self.outage_s, pause_s)
