"""Which names and values look like secrets, and values without them: for `repr`, logs, messages and state."""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

_SECRET = re.compile(
    r"(TOKEN|KEY|CREDENTIALS?|PASS|(^|_)(PW|PWD|PAT|AUTH|DSN|PSK))_?\d*$"
    r"|SECRET|PASSWORD|PASSWD|PASSPHRASE|ACCESS_KEY|AUTHORIZATION|COOKIE|CONNECTION_STRING",
    re.IGNORECASE,
)
_PUBLIC = re.compile(
    r"(VLLM|SGLANG|NCCL|GLOO|UCX|CUDA|NVIDIA|TORCH|TRITON|OMP|MKL|RAY|HF|PENSTOCK|PYTHON|LD|TOKENIZERS)_?[A-Z]"
    r"|.*_(PROXY|URL|ENDPOINT|HOST|PORT|REGION|HOME|DIR|PATH|LEVEL)$",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"[\d.]*|true|false|on|off|yes|no", re.IGNORECASE)
"""Names and values of environment variables that are no secrets."""
STARS = "*" * 10
_LOGIN = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*(?=@)")
"""User and password in a URL, as in `HTTPS_PROXY`."""
_SIGNATURE = re.compile(
    r"(?<=[?&])([\w-]*(?:sig|signature|token|key|credential|secret|password)=)[^&\s]+", re.IGNORECASE
)
"""In a signed URL."""


def is_secret(name: str) -> bool:
    """Whether a name looks like that of a secret (`HF_TOKEN`, `api_key`, `AWS_SECRET_ACCESS_KEY`)."""
    return bool(_SECRET.search(name))


def masked(value: Any) -> Any:
    """`value` with stars in place of what has a secret-looking name, and of logins and signatures in URLs."""
    if isinstance(value, dict):
        entries = typing.cast("dict[Any, Any]", value)
        shown = {"key"} if "cert" in entries else set[str]()  # a file beside the certificate's
        hides = {k for k, v in entries.items() if is_secret(str(k)) and v and v is not True} - shown
        found = {k: STARS if k in hides else masked(v) for k, v in entries.items()}
        if isinstance(variables := entries.get("env_vars"), dict):
            found["env_vars"] = _variables(typing.cast("dict[Any, Any]", variables))
        return found
    if isinstance(value, list):
        return [masked(item) for item in typing.cast("list[Any]", value)]
    if not isinstance(value, str):
        return value
    return _SIGNATURE.sub(rf"\1{STARS}", _LOGIN.sub(STARS, value))


def _variables(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """Of a process: with stars where nothing says that the value is no secret."""
    return {
        k: masked({k: v})[k] if _PUBLIC.match(str(k)) or _PLAIN.fullmatch(str(v)) else STARS
        for k, v in entries.items()
    }


def unmasked(value: Any, secret: Callable[[str], str], path: str = "") -> Any:
    """`value` with texts of `secret` in place of those with stars. secret: called with the path of each, such
    as `gateway.api_key`.
    """
    if isinstance(value, dict):
        entries = typing.cast("dict[str, Any]", value)
        return {k: unmasked(one, secret, f"{path}.{k}".strip(".")) for k, one in entries.items()}
    if isinstance(value, list):
        items = typing.cast("list[Any]", value)
        return [unmasked(one, secret, f"{path}[{i}]") for i, one in enumerate(items)]
    return secret(path) if isinstance(value, str) and STARS in value else value


def parted(variables: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Environment variables that everybody may see, and those that nobody may."""
    hidden = {name: text for name, text in variables.items() if is_secret(name) or masked(text) != text}
    return {name: text for name, text in variables.items() if name not in hidden}, hidden
