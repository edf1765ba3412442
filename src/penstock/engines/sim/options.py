"""Options of the simulated engine: `engine_kwargs` of an `llm_engine: sim` model."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from penstock.config.schema.strict import StrictModel, optional, setting


class SimOptions(StrictModel):
    """Size, speed and failures of the simulated engine. Without step times and with free prefill it answers
    at once.

    A step of the engine takes `step_base_ms`, `step_per_request_ms` for each request that decodes in it and
    `step_per_kv_token_ns` for each token that these look back upon; and its prompt tokens /
    `prefill_tokens_per_s`, with `prefill_per_kv_token_ns` for each token that each of them looks back upon.
    """

    max_model_len: int = setting(16_384, "Context window, in tokens.", ge=2)
    max_num_seqs: int = setting(256, "Requests in one batch; more of them wait.", ge=1)
    max_num_batched_tokens: int = setting(8_192, "Tokens in one step, prompts' and made ones.", ge=1)
    scheduling_policy: Literal["fcfs", "priority"] = setting(
        "fcfs", "`priority`: online requests go before batch, and batch gives way first."
    )
    kv_tokens: int = setting(262_144, "Tokens that the KV cache holds, rounded up to whole blocks.", ge=2)
    block_size: int = setting(16, "Tokens in one block of the KV cache.", ge=1)
    enable_prefix_caching: bool = setting(
        True, "Requests find what others with the same beginning have computed."
    )
    enable_prompt_tokens_details: bool = setting(
        False, "Usage says how many tokens of the prompt were found in the cache."
    )

    prefill_tokens_per_s: float = setting(
        20_000.0, "Speed of prefill; `.inf` makes it free.", gt=0, allow_inf_nan=True
    )
    prefill_per_kv_token_ns: float = setting(
        0.0, "Nanoseconds more for each prompt token and each token before it.", ge=0
    )
    step_base_ms: float = setting(5.0, "Milliseconds that every step takes.", ge=0)
    step_per_request_ms: float = setting(0.02, "Milliseconds more for each decoding request.", ge=0)
    step_per_kv_token_ns: float = setting(
        0.0, "Nanoseconds more for each token of KV that decoding requests read.", ge=0
    )

    adapter_load_s: float = setting(0.0, "Seconds that loading an adapter takes.", ge=0)

    reply: str | None = optional("Every answer; without it, the prompt's echo.", min_length=1)
    replies: dict[str, str] = setting({}, "Answer by the text of the last message or prompt.")
    embedding_size: int = setting(64, "Numbers in an embedding.", ge=1)

    start_delay_s: float = setting(0.0, "Seconds that starting takes.", ge=0)
    wake_delay_s: float = setting(0.0, "Seconds that waking up takes.", ge=0)
    start_error: str | None = optional("Starting fails with this reason.")
    error_every: int | None = optional("Every n-th request is refused with status 500.", ge=1)
    fail_after_tokens: int | None = optional("Each answer breaks off after n tokens.", ge=0)
    die_after_requests: int | None = optional("The engine dies when it has answered n.", ge=1)
    die_after_tokens: int | None = optional("The engine dies when it has made n tokens.", ge=1)

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
