"""Which capabilities are on with the installed vLLM, and why the others are off. Imports nothing of vLLM.

The comparison takes a second; its result is cached until vLLM or the table changes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.config import Settings
from penstock.config.messages.problems import config_error, unknown
from penstock.engines.vllm.arguments import answer_cache
from penstock.engines.vllm.arguments.source import PackageSource
from penstock.engines.vllm.capabilities.needs import Need
from penstock.engines.vllm.capabilities.table import CAPABILITIES, FLOOR
from penstock.errors import EngineStartFailed

log = logging.getLogger(__name__)

ALL = "all"
VARIABLE = "PENSTOCK_VLLM_CAPABILITIES_OFF"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """off: by name of a capability, why."""

    off: Mapping[str, str]

    def has(self, name: str) -> bool:
        if name not in CAPABILITIES:
            raise KeyError(name)
        return name not in self.off

    def report(self) -> None:
        """Logs each that is off."""
        for name, why in self.off.items():
            log.warning("vLLM's capability %s is off (%s): %s.", name, why, CAPABILITIES[name].lost)


@dataclass(frozen=True, slots=True)
class Fit:
    """How an installed vLLM differs from what Penstock expects.

    floor: what it cannot do without; None where it is there. gaps: by name of a capability.
    """

    floor: str | None
    gaps: Mapping[str, str]


def capabilities() -> Capabilities:
    """Those of the installed vLLM, without those that the environment switches off.

    Raises: EngineStartFailed when vLLM lacks what no engine can do without; ConfigError for a name in
    PENSTOCK_VLLM_CAPABILITIES_OFF that is none.
    """
    switched_off = _switched_off(Settings.read().vllm_capabilities_off)
    found = fit()
    if found is None:
        return Capabilities({})
    if found.floor is not None:
        raise EngineStartFailed(
            f"This Penstock does not fit the installed vLLM: {found.floor}. Run vLLM's own server as the "
            "engine's process instead (`llm_engine: process`), or install a version that the compatibility "
            "page names."
        )
    return Capabilities(_with_dependents(dict(found.gaps) | switched_off))


def fit() -> Fit | None:
    """The installed vLLM's; None when it is not installed."""
    source = PackageSource.installed("vllm")
    if source is None:
        return None
    question = f"capabilities {_digest()}"
    answer = answer_cache.find(question)
    if answer is None:
        found = compare(source)
        answer_cache.keep(question, asdict(found))
        return found
    return Fit(**answer)


def compare(source: PackageSource) -> Fit:
    """Reads vLLM's source. Takes a second."""
    gaps = {name: _gap(each.needs, source) for name, each in CAPABILITIES.items()}
    return Fit(_gap(FLOOR, source), {name: gap for name, gap in gaps.items() if gap is not None})


def _gap(needs: Iterable[Need], source: PackageSource) -> str | None:
    return next((gap for need in needs if (gap := need(source)) is not None), None)


def _switched_off(text: str) -> dict[str, str]:
    names = [name for part in text.split(",") if (name := part.strip())]
    names = list(CAPABILITIES) if names == [ALL] else names
    if wrong := [name for name in names if name not in CAPABILITIES]:
        raise config_error([f"{VARIABLE}: {unknown('capability', wrong[0], [*CAPABILITIES, ALL])}"])
    return dict.fromkeys(names, f"{VARIABLE} names it")


def _with_dependents(off: dict[str, str]) -> dict[str, str]:
    """The table lists each capability after those on which it stands."""
    for name, capability in CAPABILITIES.items():
        lacking = [one for one in capability.on if one in off]
        if lacking and name not in off:
            off[name] = f"{lacking[0]} is off"
    return {name: off[name] for name in CAPABILITIES if name in off}


def _digest() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
