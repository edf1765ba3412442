"""`GatewayConfig`: what users say about the gateway."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, cast
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, field_validator, model_validator

from penstock.config.schema.paths import LocalFile
from penstock.config.schema.settings import SentKey, Settings
from penstock.config.schema.strict import Name, RootConfig, StrictModel, optional, setting
from penstock.config.schema.tenants import KeyConfig, OidcConfig, PriceConfig, TenantConfig

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_REACHED = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # what listens on all addresses is reached on this one


def _secret(value: object) -> object:
    return SecretStr(value) if isinstance(value, str) else value


_Key = Annotated[SentKey, BeforeValidator(_secret)]


class CorsConfig(StrictModel):
    """Which web pages may read the gateway's answers (Fetch standard, CORS protocol)."""

    origins: list[str] = Field(
        min_length=1,
        description='Origins of these pages, as `https://app.example.com` or `http://localhost:3000`; `"*"` '
        "for all.",
    )
    credentials: bool = setting(
        False,
        "Whether browsers may send cookies along, for a proxy before the gateway that asks for "
        "them. API keys do not need it.",
    )

    @field_validator("origins")
    @classmethod
    def _as_browsers_send_them(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"{origin!r} is not an origin; write the scheme, the host in lower case and the port "
                    'where it is not the usual one, as in `https://app.example.com`, or `"*"` for all.'
                )
        return origins

    @model_validator(mode="after")
    def _credentials_by_name(self) -> Self:
        if self.credentials and "*" in self.origins:
            raise ValueError('credentials need origins by name; browsers refuse them with `"*"`.')
        return self


class TlsConfig(StrictModel):
    """The certificate of the gateway's own port. Both files are read again when they change."""

    cert: LocalFile = Field(
        description="PEM file of the certificate, followed by those between it and the root. A relative "
        "path counts from the folder of the config file."
    )
    key: LocalFile = Field(description="PEM file of its private key, without a passphrase.")


def _reachable(url: str) -> str:
    """Raises: ValueError for what no request can be sent to."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        is_url = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or not url.isprintable() or " " in url:
        raise ValueError("must be a URL, as https://billing.example.com/penstock.")
    return url


class GatewayConfig(RootConfig):
    """The OpenAI-compatible gateway to all models."""

    host: str = setting("127.0.0.1", "Address to listen on.", min_length=1)
    port: int | None = optional(
        "Own port. Without it the gateway stands behind Ray Serve's HTTP.", ge=1, le=65535
    )
    tls: TlsConfig | None = optional("HTTPS on the own port.")
    cors: CorsConfig | None = optional(
        "Web pages of other origins that may call the gateway; without it, none."
    )
    processes: int = setting(
        1,
        "Gateway processes. They share the own port; when one dies or hangs, the others go on.",
        ge=1,
        le=64,
    )
    api_key: _Key = Field(
        default_factory=lambda: Settings.read().api_key,
        description="Key that clients must send. Without it PENSTOCK_API_KEY, or VLLM_API_KEY; "
        "without any, every key is accepted.",
    )
    admin_key: _Key = Field(
        default_factory=lambda: Settings.read().admin_key,
        description="Key of the endpoints under `/admin`, by which models are put to sleep, paused and more. "
        "Without it PENSTOCK_ADMIN_KEY; without both there are no such endpoints.",
    )
    keys: list[KeyConfig] = setting(
        [],
        "Keys of tenants, each with its own models, scopes and limits. `api_key` is then that of the tenant "
        "`default`. See docs/operate/tenants.md.",
    )
    keys_file: LocalFile | None = optional(
        "File with more of `keys` and `tenants`, YAML or JSON, which `penstock keys` writes. It is read "
        "again within a second of a change."
    )
    oidc: OidcConfig | None = optional("Tokens of an identity provider, beside keys of tenants.")
    tenants: dict[Name, TenantConfig] = setting({}, "Limits of tenants.")
    prices: dict[str, PriceConfig] = setting(
        {}, "What requests of tenants cost, by the id of the model, or `MODEL:ADAPTER`."
    )
    webhook: Annotated[str, AfterValidator(_reachable)] | None = optional(
        "URL that is told of usage, and of budgets that reach a line, as Standard Webhooks are. Signed where "
        "PENSTOCK_WEBHOOK_SECRET is set. See docs/operate/tenants.md."
    )
    isolate_cache: bool = setting(
        False,
        "Whether each tenant has a prefix cache of its own, so that times tell nothing of what others ask. "
        "What tenants have in common is then computed for each of them.",
    )
    default_model: str | None = optional(
        "Model of requests that name none. With one model, that one.", min_length=1
    )
    priority_tier: bool = setting(
        False,
        "Whether requests with `service_tier: priority` go before all others. Otherwise they are "
        "`default`, and their answers say so. See docs/operate/one-fleet.md.",
    )
    request_timeout_s: float = setting(600.0, "Time limit of one request.", gt=0)
    max_body_bytes: int = setting(64 * 2**20, "Size limit of a request's body.", gt=0)
    max_bodies_bytes: int = setting(
        2**30, "Size limit of all bodies that wait for their answers to begin, in each gateway process.", gt=0
    )
    max_connections_per_address: int = setting(
        4096,
        "Connections of one address (IPv6: of one /64 network) to the gateway's own port that "
        "have no accepted request open. Above it the one that has waited longest is closed.",
        gt=0,
    )
    wait_for_replica_s: float = setting(30.0, "How long a request waits while no replica is there.", ge=0)
    log_format: Literal["text", "json"] = setting("text", "Form of the log lines.")

    @model_validator(mode="before")
    @classmethod
    def _empty_port(cls, values: Any) -> Any:
        """`port:` without a number names none, as where it is left out."""
        if isinstance(values, Mapping):
            entries = cast("Mapping[str, Any]", values)
            return {name: one for name, one in entries.items() if name != "port" or one is not None}
        return values

    @model_validator(mode="after")
    def _two_keys(self) -> Self:
        if self.admin_key is not None and self.admin_key == self.api_key:
            raise ValueError(
                "admin_key must differ from api_key: with one key every client is an administrator."
            )
        return self

    @model_validator(mode="after")
    def _webhook_has_news(self) -> Self:
        if self.webhook is not None and not self.keyed:
            raise ValueError("webhook tells of tenants: set keys, keys_file or oidc, or leave it out.")
        return self

    @property
    def local_url(self) -> str:
        """Where this machine reaches the gateway's own port."""
        host = _REACHED.get(self.host, self.host)
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def keyed(self) -> bool:
        """Whether there are keys of tenants, or tokens."""
        return bool(self.keys) or self.keys_file is not None or self.oidc is not None
