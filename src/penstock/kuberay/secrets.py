"""Keeps secrets out of manifests: configs refer to them by name, pods get them from a Secret."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from penstock.config import GatewayConfig, LLMConfig, LLMServingArgs
from penstock.config.fleet.document import document
from penstock.config.messages.problems import config_error
from penstock.config.messages.redact import is_secret, masked, parted

API_KEY, ADMIN_KEY, HUB_TOKEN = "PENSTOCK_API_KEY", "PENSTOCK_ADMIN_KEY", "HF_TOKEN"
WEBHOOK_SECRET = "PENSTOCK_WEBHOOK_SECRET"
REDIS_PASSWORD = "REDIS_PASSWORD"
_REFERENCE = re.compile(r"\$\{(\w+)\}")
_SPECIAL = re.compile(r"[<\[].*[>\]]")
"""Tokens of a tokenizer, such as `<think>`."""


def referenced(configs: Sequence[LLMConfig]) -> list[str]:
    """Names of the variables that configs take from the environment, as `${NAME}`."""
    texts = [
        str(text) for config in configs for variables in _variables(config) for text in variables.values()
    ]
    return sorted({found[1] for text in texts if (found := _REFERENCE.fullmatch(text))})


def refuse_values(serving: LLMServingArgs, secret: str) -> None:
    """Raises: ConfigError for each secret that stands in a file."""
    rest = {name: one for name, one in document(serving).items() if name != "llm_configs"}
    keys = {"api_key": API_KEY, "admin_key": ADMIN_KEY}
    gateway = rest.get("gateway", {})
    problems = [
        f"gateway.{field} is a secret with its value, and a manifest is no place for it. Leave it out and "
        f"put {name} into the Secret {secret!r}."
        for field, name in keys.items()
        if gateway.pop(field, None) is not None
    ]
    parts = [(f"{config.location}: ", document(config)) for config in serving.llm_configs]
    problems += [
        f"{where}{path} is a secret with its value, and a manifest is no place for it. {_instead(name)} in "
        f"`runtime_env: {{env_vars: ...}}` of a model, and put the value into the Secret {secret!r}."
        for where, part in (*parts, ("", rest))
        for path, name in _secrets(part)
    ]
    if problems:
        raise config_error(dict.fromkeys(problems))


def _instead(variable: str) -> str:
    if variable:
        return f"Write {variable}: ${{{variable}}}"
    return "Leave it out, and have what needs it read a variable. Write NAME: ${NAME}"


def _secrets(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Where one stands in a document, and the variable's name where it is one of `env_vars`. Others are
    texts with the name of a secret, and URLs with a login.
    """
    match value:
        case dict():
            entries = cast("dict[str, Any]", value)
            has_names = path.endswith("adapters") or "cert" in entries  # users' own, or those of files
            for name, one in entries.items():
                where = f"{path}.{name}".strip(".")
                if name == "env_vars" and isinstance(one, dict):
                    hidden = parted(cast("dict[str, str]", one))[1]
                    named = [each for each, text in hidden.items() if not _REFERENCE.fullmatch(str(text))]
                    yield from ((f"{where}.{each}", each) for each in named)
                elif isinstance(one, str) and is_secret(name) and not (has_names or _SPECIAL.fullmatch(one)):
                    yield where, ""
                else:
                    yield from _secrets(one, where)
        case list():
            for number, one in enumerate(cast("list[Any]", value)):
                yield from _secrets(one, f"{path}[{number}]")
        case str() if masked(value) != value:
            yield path, ""
        case _:
            return


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
    before = ((config.preprocessor_options or {}).get("ray_actor_options") or {}).get("runtime_env")
    for environment in (config.runtime_env, actor.get("runtime_env"), prefill, before):
        yield (environment or {}).get("env_vars") or {}
