"""What is wrong with an adapter's files, told from their headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint import Shapes, write_safetensors

from penstock.engines import peft
from penstock.engines.weights import Broken

pytestmark = pytest.mark.parity("S21", "X14")

BASE = {
    "model.embed_tokens.weight": (100, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.1.self_attn.q_proj.weight": (16, 8),
}


def adapter(folder: Path, tensors: Shapes, **config: Any) -> Path:
    (folder / peft.CONFIG).write_text(json.dumps({"r": 4} | config))
    write_safetensors(folder / peft.WEIGHTS, tensors)
    return folder


def change(layer: str, out: int = 16, into: int = 8, rank: int = 4) -> Shapes:
    name = f"base_model.model.{layer}"
    return {f"{name}.lora_A.weight": (rank, into), f"{name}.lora_B.weight": (out, rank)}


def fault(folder: Path, base: Shapes = BASE) -> str | None:
    try:
        peft.check(folder, max_rank=8, base=base)
    except Broken as broken:
        return str(broken)
    return None


@pytest.mark.parametrize(
    "tensors",
    [
        change("model.layers.1.self_attn.q_proj"),
        # A language model within one that sees: newer files name its layers otherwise.
        {**change("model.layers.0.self_attn.q_proj"), **change("model.language_model.layers.0.mlp.up", 5, 5)},
        # Tied to the embedding: the base has no tensor for it.
        change("lm_head", 100),
    ],
)
def test_what_may_be_right_is_left_to_the_engine(tmp_path: Path, tensors: Shapes):
    assert fault(adapter(tmp_path, tensors)) is None


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (change("model.layers.2.self_attn.q_proj"), "this one has no model.layers.2.self_attn.q_proj"),
        (
            change("model.layers.1.self_attn.q_proj", into=9),
            "for a matrix of 16 x 9, and here that is 16 x 8",
        ),
        (change("model.layers.1.self_attn.q_proj", rank=6), "says rank 4, its tensors"),
        (change("model.layers.1.self_attn.q_proj", rank=2), "says rank 4, its tensors"),
        ({"base_model.model.x.lora_A.weight": (4, 8)}, "are not a pair of lora_A and lora_B"),
        ({"base_model.model.model.layers.0.mlp.weight": (4, 8)}, "holds no LoRA tensors"),
    ],
)
def test_what_cannot_be_right_is_named(tmp_path: Path, tensors: Shapes, said: str):
    assert said in (fault(adapter(tmp_path, tensors)) or "")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"r": 9}, "its rank is 9, and this model takes at most 8; raise `max_lora_rank`"),
        ({"rank_pattern": {"q_proj": 16}}, "its rank is 16"),
        ({"r": "4"}, "gives no rank `r`"),
        ({"r": 0}, "gives no rank `r`"),
        ({"rank_pattern": [1]}, "gives no rank `r`"),
        ({"rank_pattern": {"(q_proj": 4}}, "has a faulty expression"),
        ({"peft_type": "IA3"}, "its peft_type is 'IA3', and only 'LORA' can be served"),
    ],
)
def test_a_config_that_cannot_be_served_is_named(tmp_path: Path, config: dict[str, Any], said: str):
    assert said in (fault(adapter(tmp_path, change("model.layers.0.self_attn.q_proj"), **config)) or "")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "its adapter_model.safetensors is no safetensors file"),
        (b"\x08\0\0\0\0\0\0\0[1, 2, 3", "is no safetensors file"),
        (b"\xff" * 64, "is no safetensors file, or is cut off"),
        (b"PK\x03\x04" + bytes(100), "is no safetensors file"),
        (b"\x02\0\0\0\0\0\0\0{}", "holds no LoRA tensors"),
        (b'\x10\0\0\0\0\0\0\0{"a": [1, 2, 3]}', "is no safetensors file"),
    ],
)
def test_a_file_that_is_none_is_named(tmp_path: Path, content: bytes, said: str):
    adapter(tmp_path, {})
    (tmp_path / peft.WEIGHTS).write_bytes(content)
    assert said in (fault(tmp_path) or "")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe", b'"r"', b"null", b"[" * 10**5])
def test_a_config_that_is_none_is_named(tmp_path: Path, content: bytes):
    (tmp_path / peft.CONFIG).write_bytes(content)
    assert "adapter_config.json" in (fault(tmp_path) or "")


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path):
    adapter(tmp_path, change("model.layers.0.self_attn.q_proj"))
    (tmp_path / peft.CONFIG).unlink()
    (tmp_path / peft.CONFIG).mkdir()
    assert fault(tmp_path) == "it has no readable adapter_config.json"
