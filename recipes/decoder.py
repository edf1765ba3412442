"""How decoders of these recipes learn: rows of tokens with labels, their leads, and two optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

IGNORED = -100

Row = tuple[list[int], list[int]]
"""Token ids, and the same ids as labels with IGNORED in place of all that is not to be learned."""

_ROWS_AT_A_TIME = 64


def predict(model: PreTrainedModel, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every label of `rows` that counts: the logits (n, vocabulary), the label (n,), its row (n,)."""
    width = max(len(ids) for ids, _ in rows)
    # Filled up on the right, where no token of a causal model looks: no mask is needed.
    inputs = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for _, labels in rows])[:, 1:]
    hidden = model.model(input_ids=inputs[:, :-1], use_cache=False).last_hidden_state
    counts = labels != IGNORED
    return model.lm_head(hidden[counts]), labels[counts], counts.nonzero()[:, 0]


@torch.inference_mode()
def leads(model: PreTrainedModel, rows: list[Row]) -> list[float]:
    """For each row, by how much a right token leads the best wrong one at least; below 0 it is lost.

    Units: logits. bfloat16 moves a lead by about 0.1.
    """
    found: list[float] = []
    for first in range(0, len(rows), _ROWS_AT_A_TIME):
        some = rows[first : first + _ROWS_AT_A_TIME]
        logits, labels, owners = predict(model, some)
        found += least(ahead(logits, labels), owners, len(some))
    return found


def ahead(logits: torch.Tensor, labels: torch.Tensor, near: torch.Tensor | int = 0) -> torch.Tensor:
    """By how much each label leads the best wrong one. near: how far from it what counts as right may lie.

    Shapes: logits (n, labels); labels, near and the result (n,).
    """
    apart = (torch.arange(logits.shape[1]) - labels[:, None]).abs()
    right = apart <= torch.as_tensor(near).expand(len(labels))[:, None]
    best = logits.masked_fill(~right, float("-inf")).amax(dim=1)
    return (best - logits.masked_fill(right, float("-inf")).amax(dim=1)).float()


def least(values: torch.Tensor, owners: torch.Tensor, count: int) -> list[float]:
    """The least of each owner's values. Shapes: values and owners (n,); the result (count,)."""
    return torch.full((count,), float("inf")).scatter_reduce(0, owners, values, "amin").tolist()


class Steps:
    """Muon for the matrices, which need fewer steps with it, and AdamW for the rest, at one rate."""

    def __init__(
        self, model: PreTrainedModel, muon: float, adam: float, rate: Callable[[int], float]
    ) -> None:
        """muon, adam: learning rates. rate: their share at each step, from 0 on."""
        layers = list(model.model.layers.parameters())
        others = [weight for weight in layers if weight.ndim != 2]
        others += [model.model.embed_tokens.weight, model.model.norm.weight]
        self._model = model
        self._schedules = [
            LambdaLR(optimizer, rate)
            for optimizer in (
                Muon((weight for weight in layers if weight.ndim == 2), muon),
                torch.optim.AdamW(others, lr=adam, betas=(0.9, 0.95), weight_decay=0.0),
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


class Muon(torch.optim.Optimizer):
    """As `torch.optim.Muon`, but in the weights' own precision.

    That one multiplies in bfloat16, for which CPUs without AVX512 have no instructions: there these matrices
    take fifteen times as long as in float32.
    Source: Jordan et al., Muon, 2024, https://kellerjordan.github.io/posts/muon/.
    """

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                slope, kept = weight.grad, 1 - group["momentum"]
                mean = self.state[weight].setdefault("mean", torch.zeros_like(slope)).lerp_(slope, kept)
                stretch = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
                weight.add_(_orthogonal(torch.lerp(mean, slope, kept)), alpha=-group["lr"] * stretch)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest matrix whose singular values are all 1, by five steps of Newton and Schulz."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    found = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        square = found @ found.T
        found = torch.addmm(
            found, torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315), found, beta=3.4445
        )
    return found if wide is matrix else found.T
