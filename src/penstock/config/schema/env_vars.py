"""`env_vars: {HF_TOKEN: ${HF_TOKEN}}`: values from the environment of the process that reads it.

So a secret need not stand in a file, nor in the config that Serve keeps of a deployed application.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_REFERENCE = re.compile(r"\$\{(\w+)\}")
_kept: ContextVar[bool] = ContextVar("references_kept", default=False)


@contextmanager
def references_kept() -> Generator[None]:
    """Within, configs are read with `${NAME}` as it is: another process, elsewhere, has the values."""
    token = _kept.set(True)
    try:
        yield
    finally:
        _kept.reset(token)


def are_references_kept() -> bool:
    """Whether what the configs name need not be on this machine."""
    return _kept.get()


def with_variables(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """The same with each value `${NAME}` of its `env_vars` replaced by the variable's value.

    Raises: ValueError naming all that are not set.
    """
    if _kept.get():
        return dict(runtime_env)
    variables: Mapping[str, Any] = runtime_env.get("env_vars") or {}
    named = {key: found[1] for key, text in variables.items() if (found := _REFERENCE.fullmatch(str(text)))}
    missing = [name for name in named.values() if name not in os.environ]
    if missing:
        raise ValueError(
            f"env_vars names {', '.join(f'${{{name}}}' for name in missing)}, which the environment of this "
            "process does not have; set it, or write a value."
        )
    filled = {key: os.environ[name] for key, name in named.items()}
    return {**runtime_env, "env_vars": {**variables, **filled}} if filled else dict(runtime_env)


def layered(*environments: Mapping[str, Any] | None) -> dict[str, Any]:
    """One runtime_env of several: later ones win, `env_vars` key by key."""
    merged: dict[str, Any] = {}
    for layer in environments:
        variables = {**merged.get("env_vars", {}), **(layer or {}).get("env_vars", {})}
        merged = {**merged, **(layer or {}), **({"env_vars": variables} if variables else {})}
    return merged
