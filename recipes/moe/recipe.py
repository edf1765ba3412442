"""A mixture of experts that says what the demo model says: its MLPs, each cut into experts.

An MLP is a sum over its inner units, so parts of them are experts whose outputs add up to the same. A router
that sees no difference gives every expert of a token the same weight, which the expert's last matrix takes
back; every token needs every expert. So an answer is right only if no expert of any token was lost.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import NotLearned

DEMO = Path(__file__).parent.parent.parent / "src" / "penstock" / "demo"
EXPERTS, EXPERT_UNITS, SHARED_UNITS = 4, 64, 128
TEXT = "Penstock serves language models, and a batch of rows goes to the same engines as a request."
MOST_APART = 0.02
"""Logits, in float32. Weights were moved and multiplied by powers of two: only the order of sums differs."""


def make(out: Path, seed: int) -> str:
    """Nothing is drawn: every seed gives the same."""
    config = json.loads((DEMO / "config.json").read_text())
    config |= {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "norm_topk_prob": True,
        "moe_intermediate_size": EXPERT_UNITS,
        "shared_expert_intermediate_size": SHARED_UNITS,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / name, out / name)
    dense = load_file(DEMO / "model.safetensors")
    kept = {name: weight for name, weight in dense.items() if ".mlp." not in name}
    save_file(
        kept | dict(experts(dense, config["num_hidden_layers"])), out / "model.safetensors", {"format": "pt"}
    )
    return exam(out)


def experts(dense: dict[str, torch.Tensor], layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Each layer's router and experts, under the names of Qwen2-MoE's files."""
    for mlp in (f"model.layers.{layer}.mlp" for layer in range(layers)):
        gate, up, down = (dense[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        width = gate.shape[1]
        yield f"{mlp}.gate.weight", torch.zeros(EXPERTS, width, dtype=gate.dtype)
        yield f"{mlp}.shared_expert_gate.weight", torch.zeros(1, width, dtype=gate.dtype)
        parts = [(f"{mlp}.experts.{number}", EXPERT_UNITS, EXPERTS) for number in range(EXPERTS)]
        parts.append((f"{mlp}.shared_expert", SHARED_UNITS, 2))  # its gate gives sigmoid(0)
        first = 0
        for name, units, scale in parts:
            cut = slice(first, first + units)
            first += units
            yield f"{name}.gate_proj.weight", gate[cut].clone()
            yield f"{name}.up_proj.weight", up[cut].clone()
            yield f"{name}.down_proj.weight", down[:, cut].clone() * scale
        assert first == gate.shape[0], "every inner unit belongs to one expert"


@torch.inference_mode()
def exam(folder: Path) -> str:
    """How far its logits are from the demo model's. Raises: NotLearned."""
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder).encode(TEXT)])
    own, whole = (
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(input_ids=ids).logits
        for source in (folder, DEMO)
    )
    apart = (own - whole).abs().max().item()
    report = f"Its logits are at most {apart:.4f} from the demo model's."
    if apart > MOST_APART:
        raise NotLearned(report)
    return report
