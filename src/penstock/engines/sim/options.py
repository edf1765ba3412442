"""Options of the simulated engine: `engine_kwargs` of an `llm_engine: sim` model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from penstock.config.schema.strict import StrictModel


class SimOptions(StrictModel):
    """Size, speed and failures of the simulated engine. Without step times and with free prefill it answers
    at once.

    A step of the engine takes `step_base_ms`, `step_per_request_ms` for each request that decodes in it and
    `step_per_kv_token_ns` for each token that these look back upon; and its prompt tokens /
    `prefill_tokens_per_s`, with `prefill_per_kv_token_ns` for each token that each of them looks back upon.
    """

    max_model_len: int = Field(default=16_384, ge=2, description="Context window, in tokens.")
    max_num_seqs: int = Field(default=256, ge=1, description="Requests in one batch; more of them wait.")
    max_num_batched_tokens: int = Field(
        default=8_192, ge=1, description="Tokens in one step, prompts' and made ones."
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs",
        description="`priority`: online requests go before batch, and batch gives way first.",
    )
    kv_tokens: int = Field(
        default=262_144, ge=2, description="Tokens that the KV cache holds, rounded up to whole blocks."
    )
    block_size: int = Field(default=16, ge=1, description="Tokens in one block of the KV cache.")
    enable_prefix_caching: bool = Field(
        default=True, description="Requests find what others with the same beginning have computed."
    )
    enable_prompt_tokens_details: bool = Field(
        default=False, description="Usage says how many tokens of the prompt were found in the cache."
    )

    prefill_tokens_per_s: float = Field(
        default=20_000.0, gt=0, description="Speed of prefill; `.inf` makes it free."
    )
    prefill_per_kv_token_ns: float = Field(
        default=0.0, ge=0, description="Nanoseconds more for each prompt token and each token before it."
    )
    step_base_ms: float = Field(default=5.0, ge=0, description="Milliseconds that every step takes.")
    step_per_request_ms: float = Field(
        default=0.02, ge=0, description="Milliseconds more for each decoding request."
    )
    step_per_kv_token_ns: float = Field(
        default=0.0, ge=0, description="Nanoseconds more for each token of KV that decoding requests read."
    )

    adapter_load_s: float = Field(default=0.0, ge=0, description="Seconds that loading an adapter takes.")

    reply: str | None = Field(
        default=None, min_length=1, description="Every answer; without it, the prompt's echo."
    )
    replies: dict[str, str] = Field(
        default={}, description="Answer by the text of the last message or prompt."
    )
    embedding_size: int = Field(default=64, ge=1, description="Numbers in an embedding.")

    start_delay_s: float = Field(default=0.0, ge=0, description="Seconds that starting takes.")
    wake_delay_s: float = Field(default=0.0, ge=0, description="Seconds that waking up takes.")
    start_error: str | None = Field(default=None, description="Starting fails with this reason.")
    error_every: int | None = Field(
        default=None, ge=1, description="Every n-th request is refused with status 500."
    )
    fail_after_tokens: int | None = Field(
        default=None, ge=0, description="Each answer breaks off after n tokens."
    )
    die_after_requests: int | None = Field(
        default=None, ge=1, description="The engine dies when it has answered n."
    )
    die_after_tokens: int | None = Field(
        default=None, ge=1, description="The engine dies when it has made n tokens."
    )

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_tokens // self.block_size)

    @model_validator(mode="after")
    def _one_request_fits(self) -> Self:
        if self.kv_tokens < self.max_model_len:
            raise ValueError(
                f"kv_tokens ({self.kv_tokens}) must hold one request of max_model_len ({self.max_model_len}) "
                "tokens; raise the first or lower the second"
            )
        return self
