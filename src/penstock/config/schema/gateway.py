"""`GatewayConfig`: what users say about the gateway."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, SecretStr

from penstock.config.schema.settings import Settings
from penstock.config.schema.strict import RootConfig


def _key_from_environment() -> SecretStr | None:
    return Settings.read().api_key


def _admin_key_from_environment() -> SecretStr | None:
    return Settings.read().admin_key


def _secret(value: object) -> object:
    return SecretStr(value) if isinstance(value, str) else value


class GatewayConfig(RootConfig):
    """The OpenAI-compatible gateway to all models."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Own port. Without it the gateway stands behind Ray Serve's HTTP.",
    )
    processes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Gateway processes. On their own port they share it; when one dies, the others go on.",
    )
    api_key: Annotated[SecretStr | None, Field(min_length=1), BeforeValidator(_secret)] = Field(
        default_factory=_key_from_environment,
        description="Key that clients must send. Without it PENSTOCK_API_KEY; "
        "without both, any key is accepted.",
    )
    admin_key: Annotated[SecretStr | None, Field(min_length=1), BeforeValidator(_secret)] = Field(
        default_factory=_admin_key_from_environment,
        description="Key of the endpoints under `/admin`, by which models are put to sleep, paused and more. "
        "Without it PENSTOCK_ADMIN_KEY; without both there are no such endpoints.",
    )
    default_model: str | None = Field(
        default=None, min_length=1, description="Model of requests that name none. With one model, that one."
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="Time limit of one request.")
    max_body_bytes: int = Field(default=64 * 2**20, gt=0, description="Size limit of a request's body.")
    max_bodies_bytes: int = Field(
        default=2**30,
        gt=0,
        description="Size limit of all bodies that wait for their answers to begin, in each gateway process.",
    )
    max_connections_per_address: int = Field(
        default=4096,
        gt=0,
        description="Connections of one address (IPv6: of one /64 network) to the gateway's own port that "
        "have no accepted request open. Above it the one that has waited longest is closed.",
    )
    wait_for_replica_s: float = Field(
        default=30.0, ge=0, description="How long a request waits while no replica is there."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Form of the log lines.")
