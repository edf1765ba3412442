"""What vLLM's processes ask of the machine when Penstock's plugin is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_ASKS = """
import ctypes
from penstock.engines.vllm.core import plugin
allowed = ctypes.c_uint64()
def tiles():
    assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(allowed)) == 0  # ARCH_GET_XCOMP_PERM
    return allowed.value >> 18 & 1
before = tiles()
plugin.register()
print(before, tiles())
"""


@pytest.mark.skipif("amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="a CPU without AMX")
def test_a_process_of_vllm_may_use_the_tile_registers():
    done = subprocess.run([sys.executable, "-c", _ASKS], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["0", "1"], done.stderr
