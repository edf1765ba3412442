"""What `preflight` says of models against what vLLM itself makes of them: to the byte, on one GPU and two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ports import unused

from penstock.preflight.files import ModelFiles
from penstock.preflight.fit import dtype_of, fit
from penstock.preflight.model import ModelSize
from penstock.preflight.sizes import Sizes
from penstock.preflight.weights import COMPARED

pytestmark = [pytest.mark.full, pytest.mark.timeout(600), pytest.mark.parity("X11")]

HERE = Path(__file__).parent
AVAILABLE_BYTES = 1 << 26


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    command = [sys.executable, HERE / "checkpoints.py", tmp_path_factory.mktemp("models")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_every_architecture_that_is_called_exact_is_compared(folders: list[str]):
    files = [json.loads((Path(folder) / "config.json").read_text()) for folder in folders]
    assert {file["architectures"][0] for file in files} == set(COMPARED.split())


@pytest.mark.parametrize(("gpus", "kv_cache_dtype"), [(1, "auto"), (2, "fp8"), (4, "auto")])
def test_weights_and_cache_are_what_vllm_makes_them(folders: list[str], gpus: int, kv_cache_dtype: str):
    """Starts processes that import vLLM, but no engine. With four GPUs there are more than KV heads."""
    if gpus == 4:  # more than the key heads of one, and the groups of the other
        folders = [folder for folder in folders if not folder.endswith(("qwen3_next", "mamba2"))]
    of_all = (str(gpus), str(unused()), str(AVAILABLE_BYTES), kv_cache_dtype, *folders)
    commands = [[sys.executable, HERE / "planned.py", str(rank), *of_all] for rank in range(gpus)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    theirs = [json.loads(line) for line in ranks[0].communicate()[0].splitlines()]
    assert [rank.wait() for rank in ranks] == [0] * gpus
    ours = [said(one, gpus, kv_cache_dtype) for one in theirs]
    assert ours == theirs
    assert len(theirs) == len(folders)


def said(theirs: dict[str, Any], gpus: int, kv_cache_dtype: str) -> dict[str, Any]:
    """The same by our rules, for the block and the steps of vLLM on a CPU."""
    files = ModelFiles.at(theirs["folder"])
    sizes = Sizes(
        tensor_parallel_size=gpus,
        kv_cache_dtype=kv_cache_dtype,
        block_size=theirs["block"],
        max_num_batched_tokens=theirs["in_flight"],
        async_scheduling=False,
        mamba_ssm_cache_dtype="float32",
        enable_prefix_caching=theirs["prefix_caching"],
    )
    model = ModelSize.of(files.read("config.json"))
    weights = files.weights(model, dtype_of(model, sizes, None))
    assert weights is not None
    found = fit(model, weights, sizes, None)
    assert found.exact
    counted = {name: getattr(found, name) for name in ("dtype", "weights_bytes", "context")}
    if found.pool:
        counted |= {"block_bytes": found.pool.block_bytes, "request_bytes": found.request_bytes}
        counted["tokens"] = int(found.pool.requests(AVAILABLE_BYTES, found.context) * found.context)
    return {
        **theirs,
        **dict.fromkeys(("block_bytes", "request_bytes", "tokens") if found.pool else ()),
        **counted,
    }
