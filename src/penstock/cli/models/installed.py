"""Whether the engine that a config names is installed on this machine. Imports no engine."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from typing import Any

from penstock.config import LLMConfig, Settings
from penstock.engines.check import options_form
from penstock.engines.vllm.arguments.check import installed
from penstock.engines.vllm.capabilities import version

_OTHER_ENVIRONMENTS = ("pip", "uv", "conda", "container", "image_uri", "py_executable")
_NO_VLLM = (
    "vLLM is not installed here; install it with `pip install 'penstock[vllm]'`, or `'penstock[cpu]'` on a "
    "machine without a GPU."
)
_NO_SGLANG = (
    "SGLang is not installed beside Penstock; name the interpreter of its environment: "
    "`python: /path/to/python`."
)


def missing_engine(config: LLMConfig) -> str | None:
    """A sentence when the engine is certainly not here, or in a version that is refused.

    Says nothing where it comes from elsewhere: the user's own classes, a `runtime_env` that installs it.
    """
    brings_its_own = any(name in (config.runtime_env or {}) for name in _OTHER_ENVIRONMENTS)
    if config.server_cls is not None or Settings.read().engine_cls or brings_its_own:
        return None
    if config.engine_name == "vllm":
        return version.refusal(version.installed()) if installed() else _NO_VLLM
    return _missing_program(config)


def _missing_program(config: LLMConfig) -> str | None:
    """Of `process` the first word of its command, of `sglang` its interpreter."""
    form = options_form(config.engine_name)
    options: Any = None if form is None else form.model_validate(config.engine_kwargs)
    command: list[str] = getattr(options, "command", [])
    program: str | None = command[0] if command else getattr(options, "python", None)
    if config.engine_name == "sglang" and program is None and find_spec("sglang") is None:
        return (config.location / "engine_kwargs").says(_NO_SGLANG)
    if program is None or "{" in program or shutil.which(program) is not None:
        return None
    return (config.location / "engine_kwargs").says(f"there is no program {program!r} on this machine.")
