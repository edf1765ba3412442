"""Who may use the gateway: keys, what each may do, and limits of keys and tenants."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime, time
from functools import cache
from hashlib import sha256
from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BeforeValidator, Field, model_validator

from penstock.config.schema.strict import (
    Name,
    RootConfig,
    StrictModel,
    matching,
    optional,
    section,
    setting,
)

Scope = Literal["chat", "completions", "embeddings", "audio", "files", "batch", "metrics", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
USUAL_SCOPES: tuple[Scope, ...] = SCOPES[:6]

_BY_PATH: tuple[tuple[str, Scope], ...] = (
    ("/v1/chat", "chat"),
    ("/v1/responses", "chat"),
    ("/v1/messages", "chat"),
    ("/cohere", "chat"),
    ("/v1/audio", "audio"),
    ("/v1/files", "files"),
    ("/v1/batches", "batch"),
    ("/metrics", "metrics"),
    ("/admin", "admin"),
    ("/v1/organization", "admin"),
)
"""By how a path begins."""

_POOLING = (
    *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/generative_scoring"),
    *("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
)

_HASH = r"^sha256:[0-9a-f]{64}$"
MOST = 10**15
"""Of a limit."""
_SHORTEST_KEY = 20  # characters of a key that a person chose: its hash must not be guessed
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_SPAN, _UNITS = re.compile(r"(\d{1,6})([mhd])"), {"m": 60, "h": 3600, "d": 86_400}
_VARIABLE = re.compile(r"\$\{(\w+)\}")

_Hash = Annotated[
    str, *matching(_HASH, "`sha256:` and 64 hexadecimal digits, as `penstock keys create` writes it")
]


@cache
def scope_of(path: str) -> Scope:
    """What a key needs for a route's path. Endpoints that are not listed, users' own too: `completions`."""
    if path.startswith(_POOLING):
        return "embeddings"
    for start, scope in _BY_PATH:
        if path.startswith(start):
            return scope
    return "completions"


def span_s(text: str) -> int | None:
    """Seconds of `90d`, `12h` or `30m`; None for anything else."""
    match = _SPAN.fullmatch(text)
    return int(match[1]) * _UNITS[match[2]] if match else None


def hashed(key: str) -> str:
    """What is stored of a key. Keys are random, so a fast hash will do."""
    return f"sha256:{sha256(key.encode()).hexdigest()}"


def as_name(text: str) -> str:
    """The name of a tenant or a key that is nearest to `text`; empty where nothing of it is allowed."""
    return _NO_NAME.sub("-", text).strip("-._")[:64]


def seconds(value: Any) -> Any:
    """Seconds since 1970 of what YAML and JSON write: a date means its beginning, in UTC."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("write a date, as 2027-01-31, or a time, as 2027-01-31T12:00:00Z.") from None
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime.combine(value, time())
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return value


Moment = Annotated[float | None, BeforeValidator(seconds, float | str | None)]


class LimitsConfig(StrictModel):
    """Limits of one key, or of all keys of one tenant together. Tokens: of prompts and of answers."""

    requests_per_minute: int | None = optional("Requests in any 60 seconds.", gt=0, le=MOST)
    tokens_per_minute: int | None = optional(
        "Tokens in any 60 seconds. A request counts with an estimate until it has ended.", gt=0, le=MOST
    )
    open_requests: int | None = optional("Requests at a time.", gt=0, le=MOST)
    tokens_per_day: int | None = optional("Tokens on a day, in UTC.", gt=0, le=MOST)
    tokens_per_month: int | None = optional("Tokens in a calendar month, in UTC.", gt=0, le=MOST)
    cost_per_month: float | None = optional(
        "What requests of a calendar month, in UTC, may cost by `gateway.prices`. One that may cost more "
        "than is left is refused.",
        gt=0,
    )
    warn_cost_per_month: float | None = optional(
        "Cost of a month from which answers have the header `x-penstock-budget`, and the log a warning.",
        gt=0,
    )
    max_tokens: int | None = optional(
        "Longest answer that a request may ask for, and that one gets which does not say.", gt=0, le=MOST
    )


class PriceConfig(StrictModel):
    """What requests to one model cost, in any currency, for a million tokens. Up to 6 decimals count."""

    input: float = setting(0.0, "Prompts.", ge=0)
    cached_input: float | None = optional(
        "What of prompts was in the prefix cache; without it, as `input`.", ge=0
    )
    output: float = setting(0.0, "Answers.", ge=0)
    image: float = setting(0.0, "One picture in a prompt, beside its tokens.", ge=0)
    audio_second: float = setting(0.0, "One second of transcribed audio, where the engine reports it.", ge=0)


_Url = Annotated[
    str,
    *matching(
        r"^(https://|http://(127\.0\.0\.1|localhost)[:/]).*$",
        "a URL with https, or http to localhost or 127.0.0.1",
    ),
]
"""Over a plain connection on this machine only: what comes from there is believed."""


class OidcConfig(StrictModel):
    """Tokens (JWT) that clients may send in place of keys. They are signed with keys of the issuer."""

    issuer: _Url = Field(description="URL of the issuer, exactly as in the tokens' `iss`.")
    audience: str = Field(description="What the tokens' `aud` must name.", min_length=1)
    jwks_url: _Url | None = optional(
        "Where the issuer's keys are. Without it, where `/.well-known/openid-configuration` says."
    )
    tenant_claim: str = setting("tenant", "Claim that names the tenant.", min_length=1)
    models_claim: str | None = optional(
        "Claim with models, as `models` of a key. Without it, all models and adapters."
    )
    scopes_claim: str | None = optional(
        "Claim with scopes; its other words are ignored. Without it, those of a key that names none."
    )


class TenantConfig(StrictModel):
    """One tenant."""

    limits: LimitsConfig = section(LimitsConfig, "Of all its keys together.")
    weight: float = setting(
        1.0,
        "Of its turns where requests wait: a tenant of weight 2 gets twice the tokens of one of 1.",
        ge=0.01,
        le=100,
    )


class KeyConfig(StrictModel):
    """One key: whose it is and what it may do. It stands here as a hash."""

    tenant: Name = Field(description="Who uses it: files, batches, responses and usage belong to a tenant.")
    name: Name = Field(description="Tells the tenant's keys apart, in usage and logs.")
    hash: _Hash = Field(
        "", description="`sha256:` and the hash of the key, as `penstock keys create` writes it."
    )
    key: str | None = optional(
        "The key itself in place of `hash`: `${NAME}` takes it from the environment. It is hashed when the "
        "config is read, and not kept."
    )
    models: list[str] | None = optional(
        "Models that it may use, by id or alias: `qwen` without adapters, `qwen:legal` one adapter, `qwen:*` "
        "all of them. Without it, all models and adapters.",
        min_length=1,
    )
    scopes: list[Scope] = setting(
        list(USUAL_SCOPES),
        "Endpoints that it may use. `metrics` and `admin` must be given, and see all tenants.",
        min_length=1,
    )
    expires: Moment = optional("Date or time, in UTC unless it says otherwise, from which it is refused.")
    limits: LimitsConfig = section(LimitsConfig, "Of this key.")

    @model_validator(mode="before")
    @classmethod
    def _hashed(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        values = dict(cast("Mapping[str, Any]", given))
        key = values.pop("key", None)
        if key is not None:
            if "hash" in values:
                raise ValueError("give `hash` or `key`, not both.")
            values["hash"] = hashed(_plain(key))
        elif "hash" not in values:
            raise ValueError("has neither `hash` nor `key`; `penstock keys create` makes one.")
        return values


def _plain(key: object) -> str:
    """The key that is meant. Raises: ValueError, without the key."""
    if not isinstance(key, str):
        raise ValueError("`key` must be a string.")
    if variable := _VARIABLE.fullmatch(key):
        key = os.environ.get(variable[1], "")
        if not key:
            raise ValueError(f"`key`: the environment has no {variable[1]}.")
    if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            f"`key` must have {_SHORTEST_KEY} or more printable ASCII characters, without blanks."
        )
    return key


class KeysConfig(RootConfig):
    """A file of keys, as `gateway.keys_file` names it: a file of its own, read again when it changes."""

    keys: list[KeyConfig] = setting([], "Keys that clients may send.")
    tenants: dict[Name, TenantConfig] = setting({}, "Limits of tenants.")
