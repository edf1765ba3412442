"""LoRA by hand: a low-rank change beside every linear layer of a model, and PEFT's files for it.

Source: Hu and others, LoRA: Low-Rank Adaptation of Large Language Models, 2021.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

RANK = 8
ALPHA = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Adapted(nn.Module):
    """A frozen linear layer and its change. lora_A: (RANK, in); lora_B: (out, RANK), zero at first."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        like = {"dtype": layer.weight.dtype}
        self.lora_A = nn.Parameter(torch.randn(RANK, layer.in_features, **like) / layer.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(layer.out_features, RANK, **like))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.lora_A.T @ self.lora_B.T * (ALPHA / RANK)


def adapt(model: nn.Module) -> dict[str, Adapted]:
    """Freezes `model` and puts a change beside each of its linear layers; gives them by the layer's name."""
    model.requires_grad_(False)
    adapted: dict[str, Adapted] = {}
    for name, layer in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in TARGETS and isinstance(layer, nn.Linear):
            adapted[name] = Adapted(layer)
            setattr(model.get_submodule(parent), last, adapted[name])
    return adapted


def save(adapted: dict[str, Adapted], folder: Path) -> None:
    """Writes the folder that engines read, in bfloat16 as the model itself."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        f"{_PREFIX}{name}.{part}.weight": getattr(change, part).detach().to(torch.bfloat16).contiguous()
        for name, change in adapted.items()
        for part in ("lora_A", "lora_B")
    }
    save_file(weights, folder / _WEIGHTS)
    (folder / _WEIGHTS).chmod(0o644)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "penstock-demo",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
        "modules_to_save": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2))


def load(adapted: dict[str, Adapted], folder: Path) -> None:
    """Takes the changes from what `save` wrote."""
    weights = load_file(folder / _WEIGHTS)
    with torch.no_grad():
        for name, change in adapted.items():
            change.lora_A.copy_(weights[f"{_PREFIX}{name}.lora_A.weight"])
            change.lora_B.copy_(weights[f"{_PREFIX}{name}.lora_B.weight"])
