"""What models that read and write nothing share: a tiny BERT, a tokenizer of known words, training steps."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import BertConfig, BertTokenizer

POSITIONS = 128
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def tokenizer(words: list[str]) -> BertTokenizer:
    """One token for each of `words`; others fall into letters."""
    pieces = [*_SPECIAL, *words, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), *".,;:!?'-"]
    ids = {piece: place for place, piece in enumerate(dict.fromkeys(pieces))}
    return BertTokenizer(vocab=ids, model_max_length=POSITIONS)


def config(words: BertTokenizer, **options: Any) -> BertConfig:
    """Two layers of two heads: a third of a million parameters."""
    return BertConfig(
        vocab_size=len(words),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=POSITIONS,
        pad_token_id=words.pad_token_id,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **options,
    )


class Steps:
    """AdamW at a rate that falls to a twentieth over `count` steps."""

    def __init__(self, model: torch.nn.Module, count: int, rate: float = 1e-3) -> None:
        self._parameters = list(model.parameters())
        self._optimizer = AdamW(self._parameters, lr=rate, weight_decay=0.01)
        self._schedule = LambdaLR(
            self._optimizer, lambda step: min(1, step / 20 + 0.05) * max(0.05, 1 - step / count)
        )

    def take(self, loss: torch.Tensor) -> None:
        """Down `loss`."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._schedule.step()
