"""How the eyes learn, and what they make of pictures and videos.

They learn first and alone, in a tenth of the steps that they would need together with the words: what they
make of a picture is to be near the words for what it shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from PIL.Image import Image
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import Qwen2VLForConditionalGeneration, Qwen2VLProcessor

from recipes.decoder import Muon
from recipes.vision.lessons import KINDS
from recipes.vision.pictures import COLOURS, SHAPES, drawn

LOOKS, LOOK_ROWS = 130, 48
CELLS = 4
NEARNESS = 12
"""What a logit is multiplied by, so that what is seen needs to be no larger than what is read."""

Model = Qwen2VLForConditionalGeneration
Frames = list[Image]


@dataclass(frozen=True)
class Seen:
    """What the eyes made of a picture or a video."""

    grid: torch.Tensor
    tokens: torch.Tensor


class Steps:
    """Muon for the matrices of `blocks`, AdamW for the rest of `model`; the rate falls in `count` steps."""

    def __init__(self, model: torch.nn.Module, blocks: list[torch.nn.Module], count: int) -> None:
        matrices = {weight for block in blocks for weight in block.parameters() if weight.ndim == 2}
        others = [weight for weight in model.parameters() if weight not in matrices]
        self._model = model
        self._schedules = [
            LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10) * max(0.03, 1 - step / count))
            for optimizer in (
                Muon([weight for weight in model.parameters() if weight in matrices], 0.02),
                torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0),
            )
        ]

    def take(self, loss: torch.Tensor) -> None:
        """Down `loss`."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for schedule in self._schedules:
            schedule.optimizer.step()
            schedule.optimizer.zero_grad()
            schedule.step()


def open_eyes(model: Model, processor: Qwen2VLProcessor, rng: random.Random) -> None:
    """Teaches the eyes; then they stay as they are."""
    eyes = model.model.visual
    _begin(eyes)
    words = model.get_input_embeddings().weight.detach()
    names = "".join(f" {name}" for name in (*COLOURS, *SHAPES))
    colours, shapes = words[processor.tokenizer.encode(names)].split([len(COLOURS), len(SHAPES)])
    steps = Steps(eyes, [eyes.blocks, eyes.merger], LOOKS)
    for step in range(1, LOOKS + 1):
        shown = rng.choices(range(len(KINDS)), k=LOOK_ROWS)
        seen = look(model, processor, [drawn(*KINDS[kind], rng) for kind in shown])
        means = NEARNESS * torch.stack([one.tokens.mean(dim=0) for one in seen])
        colour, shape = torch.tensor(shown) // len(SHAPES), torch.tensor(shown) % len(SHAPES)
        loss = functional.cross_entropy(means @ colours.T, colour)
        loss += functional.cross_entropy(means @ shapes.T, shape)
        steps.take(loss)
        if step % 25 == 0:
            print(f"eyes, step {step}: loss {loss.item():.4f}", flush=True)
    eyes.requires_grad_(False)


@torch.no_grad()
def _begin(eyes: torch.nn.Module) -> None:
    """Lets the first features of a patch be the colours of its cells: shapes are found sooner from these."""
    eyes.merger.mlp[2].weight.mul_(0.1)
    weight = eyes.patch_embed.proj.weight.mul_(0.1)
    side = weight.shape[-1]
    at = torch.arange(side) * CELLS // side
    for feature in range(3 * CELLS**2):
        channel, cell = divmod(feature, CELLS**2)
        row, column = divmod(cell, CELLS)
        inside = (at[:, None] == row) & (at[None] == column)
        weight[feature, channel] += inside / inside.sum()


def look(model: Model, processor: Qwen2VLProcessor, pictures: list[Image]) -> list[Seen]:
    """What the eyes make of `pictures`."""
    read = processor.image_processor(pictures, return_tensors="pt")
    grids = read["image_grid_thw"]
    return _seen(grids, model.get_image_features(read["pixel_values"], grids, return_dict=True).pooler_output)


def watch(model: Model, processor: Qwen2VLProcessor, videos: list[Frames]) -> list[Seen]:
    """What the eyes make of `videos`."""
    read = processor.video_processor(videos, return_tensors="pt", do_sample_frames=False)
    grids, pixels = read["video_grid_thw"], read["pixel_values_videos"]
    return _seen(grids, model.get_video_features(pixels, grids, return_dict=True).pooler_output)


def _seen(grids: torch.Tensor, tokens: Iterable[torch.Tensor]) -> list[Seen]:
    return [Seen(grid, some) for grid, some in zip(grids, tokens, strict=True)]
