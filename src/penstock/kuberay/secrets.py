"""Keeps secrets out of manifests: configs refer to them by name, pods get them from a Secret."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.config import GatewayConfig, LLMConfig
from penstock.config.messages.problems import config_error
from penstock.config.messages.redact import parted

API_KEY, ADMIN_KEY, HUB_TOKEN = "PENSTOCK_API_KEY", "PENSTOCK_ADMIN_KEY", "HF_TOKEN"
WEBHOOK_SECRET = "PENSTOCK_WEBHOOK_SECRET"
REDIS_PASSWORD = "REDIS_PASSWORD"
_REFERENCE = re.compile(r"\$\{(\w+)\}")


def referenced(configs: Sequence[LLMConfig]) -> list[str]:
    """Names of the variables that configs take from the environment, as `${NAME}`."""
    texts = [
        str(text) for config in configs for variables in _variables(config) for text in variables.values()
    ]
    return sorted({found[1] for text in texts if (found := _REFERENCE.fullmatch(text))})


def refuse_values(configs: Sequence[LLMConfig], gateway: GatewayConfig, secret: str) -> None:
    """Raises: ConfigError for each secret that stands in a file."""
    problems = [
        f"{config.location}: env_vars.{name} is a secret with its value, and a manifest is no place for it. "
        f"Write {name}: ${{{name}}} and put the value into the Secret {secret!r}."
        for config in configs
        for variables in _variables(config)
        for name, text in parted(variables)[1].items()
        if not _REFERENCE.fullmatch(str(text))
    ]
    problems += [
        f"gateway.{field} is a secret with its value, and a manifest is no place for it. Leave it out and "
        f"put {name} into the Secret {secret!r}."
        for field, name in (("api_key", API_KEY), ("admin_key", ADMIN_KEY))
        if field in gateway.model_fields_set and getattr(gateway, field) is not None
    ]
    if problems:
        raise config_error(dict.fromkeys(problems))


def variables_of_pods(names: Sequence[str], gateway: GatewayConfig, secret: str) -> list[dict[str, Any]]:
    """Environment of a container: the gateway's key and `names` must be in the Secret, the others may be."""
    required = [API_KEY, *(name for name in names if name not in (API_KEY, ADMIN_KEY))]
    others = (ADMIN_KEY, HUB_TOKEN, *([WEBHOOK_SECRET] if gateway.webhook else []))
    optional = [name for name in others if name not in required]
    keys: list[dict[str, Any]] = [{"name": secret, "key": name} for name in required]
    keys += [{"name": secret, "key": name, "optional": True} for name in optional]
    return [{"name": key["key"], "valueFrom": {"secretKeyRef": key}} for key in keys]


def _variables(config: LLMConfig) -> Iterator[Mapping[str, str]]:
    """Every `env_vars` of a config."""
    actor: Mapping[str, Any] = config.deployment_config.get("ray_actor_options") or {}
    prefill = config.prefill.runtime_env if config.prefill is not None else None
    for environment in (config.runtime_env, actor.get("runtime_env"), prefill):
        yield (environment or {}).get("env_vars") or {}
