"""The SGLang version that this folder supports, and the one installed."""

from __future__ import annotations

import logging
import subprocess

log = logging.getLogger(__name__)

KNOWN = "0.5.23"

_ASK = "from importlib.metadata import version; print(version('sglang'))"
_LIMIT_S = 30.0


def warn_of_another(python: str) -> None:
    """Warns when the interpreter `python` has another version. Blocks.

    If the interpreter cannot tell, the start will fail with the reason.
    """
    try:
        asked = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return
    found = asked.stdout.strip()
    if asked.returncode == 0 and found != KNOWN:
        log.warning(
            "SGLang %s is installed; this Penstock was tried with %s. In another version an argument that is "
            "false may have no effect, and a parameter another meaning.",
            found,
            KNOWN,
        )
