"""Adapters of an embedder in a real vLLM."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
import torch
from adapted import adapted
from models import model

from penstock.layers.adapters import asking_for

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.parity("S21", "X14"), pytest.mark.full]


async def test_an_adapter_changes_embeddings_in_one_batch_with_the_base(tmp_path: Path):
    """Two copies of one training agree, whatever stands beside them.

    An engine of its own: the demo model makes vectors only where it is started to.
    """
    for name in ("pirate", "pirate.2", "french"):
        shutil.copytree(model("adapters") / name.partition(".")[0], tmp_path / name)
    async with adapted(tmp_path, max_model_len=256, runner="pooling", convert="embed") as replica:

        async def embedding(adapter: str) -> torch.Tensor:
            fields = asking_for(adapter) if adapter else {}
            answered = await replica.http.post("/v1/embeddings", json={"input": "Hello!"}, headers=fields)
            assert answered.status_code == 200, answered.text
            return torch.tensor(answered.json()["data"][0]["embedding"])

        base, pirate, second, french, again = await asyncio.gather(
            *map(embedding, ("", "pirate", "pirate.2", "french", ""))
        )
    assert torch.cosine_similarity(base, again, dim=0) > 0.999
    assert torch.cosine_similarity(pirate, second, dim=0) > 0.999
    assert torch.cosine_similarity(base, pirate, dim=0) < 0.99
    assert torch.cosine_similarity(french, pirate, dim=0) < 0.99
