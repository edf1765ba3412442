"""GPUs: those of this machine, and a table of others to plan for."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from dataclasses import dataclass, replace

from penstock.config.messages.problems import unknown
from penstock.errors import ConfigError

GIB = 1 << 30
_SMI_S = 10.0

USABLE_GIB = {
    "T4": 14.6, "V100": 15.8, "V100-32G": 31.7, "A10": 22.0, "A10G": 22.0, "A30": 23.6, "A40": 44.4,
    "A100-40G": 39.4, "A100": 79.1, "A100-80G": 79.1, "L4": 22.0, "L40": 44.4, "L40S": 44.4,
    "H100": 79.1, "H100-NVL": 93.1, "H200": 139.8, "H20": 95.1, "GH200": 94.5, "B200": 178.4, "B300": 267.6,
    "RTX3090": 23.6, "RTX4090": 23.5, "RTX5090": 31.4, "RTXA6000": 47.4, "RTX6000ADA": 47.4,
    "RTXPRO6000": 94.9, "MI250": 64.0, "MI300X": 192.0, "MI325X": 256.0,
}  # fmt: skip
"""What a process can use: some 3 % less than the number on the box. PENSTOCK_GPUS adds others."""


@dataclass(frozen=True, slots=True)
class Devices:
    """`count` equal GPUs. memory_bytes: of each; free_bytes: now, where they are here."""

    name: str
    count: int
    memory_bytes: int
    free_bytes: int | None = None

    @property
    def has_bfloat16(self) -> bool:
        return not {"T4", "V100"} & set(re.split(r"[\s-]", self.name))

    @property
    def each(self) -> str:
        """Its name and size."""
        return f"{self.name} ({self.memory_bytes / GIB:.1f} GiB)"


def parse_devices(text: str, more: str) -> Devices:
    """`H100:8`, `L4`, or `48GiB:2` for others. more: the user's own, `NAME=GIB,...`. Raises: ConfigError."""
    name, _, number = text.partition(":")
    if not re.fullmatch(r"[1-9]\d*", number or "1"):
        raise ConfigError(f"--gpu {text}: {number!r} is no number of GPUs; write `H100:8`.")
    if size := re.fullmatch(r"(\d{1,6}(?:\.\d+)?)GiB", name, re.IGNORECASE):
        return Devices("GPU", int(number or 1), int(float(size[1]) * GIB))
    own = re.findall(r"([^=,\s]+)\s*=\s*(\d+(?:\.\d+)?)", more)
    table = USABLE_GIB | {known: float(gib) for known, gib in own}
    plain = {known.upper().replace("-", ""): known for known in table}
    known = plain.get(re.sub(r"^(NVIDIA|AMD)|[-_\s]", "", name.upper()))
    if known is None:
        hint = "For another one write its memory, such as `--gpu 48GiB:2`, or add it to PENSTOCK_GPUS."
        raise ConfigError(f"--gpu {text}: {unknown('GPU', name, table)} {hint}")
    return Devices(known, int(number or 1), int(table[known] * GIB))


@functools.cache
def devices_here() -> Devices | None:
    """The GPUs of this machine, taken as equal to the smallest; None without any that says its size."""
    found: list[Devices] = []
    for name, *texts in query_gpus("name", "memory.total", "memory.reserved", "memory.used"):
        total, kept, used = (int(re.sub(r"\D", "", text) or 0) << 20 for text in texts)
        found.append(Devices(re.sub(r"^(NVIDIA|AMD) ", "", name), 1, total - kept, total - kept - used))
    smallest = min(found, key=lambda one: (one.memory_bytes, one.free_bytes), default=None)
    return replace(smallest, count=len(found)) if smallest and smallest.memory_bytes > 0 else None


def query_gpus(*fields: str) -> list[list[str]]:
    """A row of texts for each GPU; none where nvidia-smi is missing or fails."""
    if (smi := shutil.which("nvidia-smi")) is None:
        return []
    query = [smi, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]
