"""Converts between `Engine.generate` and SGLang's `/generate`: a prompt into a body, events into deltas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from penstock.engine import Delta, Logprob, Prompt
from penstock.engines import foreign
from penstock.errors import BadRequest, Unsupported

PATH = "/generate"

_MEDIA = {"image": "image_data", "video": "video_data", "audio": "audio_data"}


def prompt_fields(prompt: Prompt) -> dict[str, Any]:
    """Raises: Unsupported for what SGLang has no field for; BadRequest for a prompt without a text."""
    if isinstance(prompt, str):
        return {"text": prompt}
    if not isinstance(prompt, Mapping):
        return {"input_ids": prompt}
    fields: dict[str, Any] = {}
    for key, value in prompt.items():
        if not value or key in ("prompt", "prompt_token_ids"):
            continue
        if key != "multi_modal_data":
            raise Unsupported(f"SGLang takes no '{key}' with a prompt.")
        fields |= _media(value)
    if (token_ids := prompt.get("prompt_token_ids")) is not None:
        return {"input_ids": token_ids, **fields}
    if (text := prompt.get("prompt")) is not None:
        return {"text": text, **fields}
    raise BadRequest("The prompt has neither `prompt` nor `prompt_token_ids`.", param="prompt")


def _media(data: Mapping[str, Any]) -> dict[str, Any]:
    """As URLs, `data:` URLs or paths: what travels as JSON."""
    fields: dict[str, Any] = {}
    for kind, items in data.items():
        given = items if isinstance(items, list) else [items]
        if kind not in _MEDIA or not all(isinstance(item, str) for item in given):
            raise Unsupported(f"SGLang takes {', '.join(_MEDIA)} as URLs; this '{kind}' is not one.")
        fields[_MEDIA[kind]] = given
    return fields


class _End(Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


Candidate = tuple[float | None, int, str | None]


class _Meta(Struct):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: _End | None = None
    queue_time: float | None = None
    forward_entry_time: float | None = None
    prefill_finished_time: float | None = None
    output_token_logprobs: list[Candidate] | None = None
    output_top_logprobs: list[list[Candidate] | None] | None = None


class GenerateEvent(Struct):
    """What one step added to one output."""

    text: str = ""
    output_ids: list[int] = []
    index: int = 0
    meta_info: _Meta = msgspec.field(default_factory=_Meta)

    def delta(self) -> Delta:
        """Raises: the error that ended the request, where one did."""
        meta = self.meta_info
        end = meta.finish_reason
        if end is not None and end.status_code is not None:
            raise foreign.error(end.status_code, end.message or "The request failed.", None)
        return Delta(
            self.text,
            tuple(self.output_ids),
            self.index,
            None if end is None else end.type,
            meta.prompt_tokens,
            meta.cached_tokens,
            _logprobs(meta),
        )

    @property
    def prefill_s(self) -> float | None:
        begun, ended = self.meta_info.forward_entry_time, self.meta_info.prefill_finished_time
        return None if begun is None or ended is None else max(0.0, ended - begun)


read = msgspec.json.Decoder(GenerateEvent).decode


def _logprobs(meta: _Meta) -> tuple[tuple[Logprob, ...], ...] | None:
    if meta.output_token_logprobs is None:
        return None
    others = meta.output_top_logprobs or [None] * len(meta.output_token_logprobs)
    return tuple(
        _of_token(own, top or ()) for own, top in zip(meta.output_token_logprobs, others, strict=False)
    )


def _of_token(own: Candidate, top: Sequence[Candidate]) -> tuple[Logprob, ...]:
    """The sampled token first, then the likeliest others."""
    ranks = {token_id: rank for rank, (_, token_id, _) in enumerate(top, 1)}
    others = [one for one in top if one[1] != own[1]]
    return tuple(
        Logprob(token_id, float("-inf") if value is None else value, ranks.get(token_id), text)
        for value, token_id, text in (own, *others)
    )
