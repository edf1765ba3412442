"""OpenAI's `/v1/organization/usage/...` and `/costs`, out of what the store has: a project is a tenant.

Source: OpenAI's API reference, usage and costs. The store keeps hours, and no endpoints: what has answered
with tokens, or with none of anything, counts as completions.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from penstock.errors import BadRequest, NotFound
from penstock.serve.tenancy.prices import NANO
from penstock.serve.tenancy.usage import UsageRow
from penstock.tiers import FLEX

Row = Mapping[str, Any]
Sums = Callable[[Sequence[str], float, float], list[dict[str, Any]]]
"""Usage by some dimensions, from one time until another: the rows of `UsageStore.usage`."""

_MODEL = ("model", "adapter")
_DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "project_id": ("tenant",),
    "api_key_id": ("tenant", "key"),
    "model": _MODEL,
    "line_item": _MODEL,
    "service_tier": ("tier",),
    "batch": ("tier",),
    "user_id": (),
}
"""Ours, by OpenAI's. A batch is what is `flex`; users are not known."""

_VALUES: Mapping[str, Callable[[Row], Any]] = {
    "project_id": lambda row: row["tenant"],
    "api_key_id": lambda row: f"{row['tenant']}/{row['key']}",
    "model": lambda row: f"{row['model']}:{row['adapter']}" if row["adapter"] else row["model"] or None,
    "line_item": lambda row: _VALUES["model"](row),
    "service_tier": lambda row: row["tier"],
    "batch": lambda row: row["tier"] == FLEX,
    "user_id": lambda row: None,
}
_USAGE = ("project_id", "user_id", "api_key_id", "model")
_GROUPS = {
    "usage/completions": (*_USAGE, "batch", "service_tier"),
    "usage/embeddings": _USAGE,
    "usage/audio_transcriptions": _USAGE,
    "costs": ("project_id", "user_id", "line_item", "api_key_id"),
}
"""By what results of each kind can be grouped."""

_FILTERS = {"project_ids": "project_id", "api_key_ids": "api_key_id", "models": "model", "batch": "batch"}
_ONE = ("start_time", "end_time", "bucket_width", "limit", "page")
_WIDTHS = {"1d": (86_400, 7, 31), "1h": (3600, 24, 168)}
_MOST_DAYS = 180


def page(kind: str, query: Mapping[str, list[str]], sums: Sums) -> dict[str, Any]:
    """A page of buckets. query: as clients send it. Raises: BadRequest, NotFound."""
    if (groups := _GROUPS.get(kind)) is None:
        raise NotFound(f"There is no '{kind[:60]}' of the organization; there are {', '.join(_GROUPS)}.")
    given = {name.removesuffix("[]"): values for name, values in query.items()}
    if unknown := given.keys() - {*_FILTERS, *_ONE, "group_by"}:
        raise BadRequest(f"{min(unknown)[:40]!r} is not known here.", param=min(unknown)[:40])
    group = given.get("group_by", [])
    if wrong := [name for name in group if name not in groups]:
        raise BadRequest(f"group_by is {wrong[0][:40]!r}; there are {', '.join(groups)}.", param="group_by")
    width = given.get("bucket_width", ["1d"])[0]
    if width not in _WIDTHS or (kind == "costs" and width != "1d"):
        raise BadRequest("bucket_width is 1d, or 1h of usage, kept by the hour.", param="bucket_width")
    seconds, usual, most = _WIDTHS[width]
    limit = _number(given, "limit", usual)
    if not 1 <= limit <= (most := _MOST_DAYS if kind == "costs" else most):
        raise BadRequest(f"limit is {limit}; it can be 1 to {most}.", param="limit")
    begin, end = _number(given, "start_time", None), _number(given, "end_time", int(time.time()))
    begin = max(begin, _number(given, "page", begin)) // seconds * seconds
    starts = range(begin, end, seconds)
    shown, more = starts[:limit], len(starts) > limit
    filters = {_FILTERS[name]: values for name, values in given.items() if name in _FILTERS}
    buckets: dict[int, dict[tuple[Any, ...], Counter[str]]] = {start: {} for start in shown}
    by = {"day" if width == "1d" else "hour", *_MODEL}
    by.update(name for one in (*group, *filters) for name in _DIMENSIONS[one])
    for row in sums(sorted(by), begin, begin + limit * seconds - 1) if shown else ():
        at = datetime.fromisoformat(row["day"] if width == "1d" else row["hour"])
        bucket = buckets.get(int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()))
        wanted = all(_text(_VALUES[name](row)) in values for name, values in filters.items())
        if bucket is not None and wanted and kind in ("costs", _kind(row)):
            counts = bucket.setdefault(tuple(_VALUES[name](row) for name in group), Counter())
            counts.update({name: row[name] for name in UsageRow.__struct_fields__})
    data = [
        {
            "object": "bucket",
            "start_time": start,
            "end_time": start + seconds,
            "results": [
                {**dict.fromkeys(groups), **_result(kind, counts), **dict(zip(group, values, strict=True))}
                for values, counts in sorted(bucket.items(), key=str)
            ],
        }
        for start, bucket in buckets.items()
    ]
    following = str(starts[limit]) if more else None
    return {"object": "page", "data": data, "has_more": more, "next_page": following}


def _text(value: Any) -> str:
    """As clients write it in a filter."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kind(row: Row) -> str:
    if row["audio_seconds"]:
        return "usage/audio_transcriptions"
    return "usage/embeddings" if row["prompt_tokens"] and not row["output_tokens"] else "usage/completions"


def _result(kind: str, counts: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {"object": f"organization.{kind.replace('/', '.')}.result"}
    if kind == "costs":  # in whatever currency the prices are
        return found | {"amount": {"value": counts["cost"] / NANO, "currency": None}}
    found["num_model_requests"] = counts["requests"]
    if kind == "usage/audio_transcriptions":
        return found | {"seconds": counts["audio_seconds"]}
    found["input_tokens"] = counts["prompt_tokens"]
    if kind == "usage/completions":
        found |= {"output_tokens": counts["output_tokens"], "input_cached_tokens": counts["cached_tokens"]}
    return found


def _number(given: Mapping[str, list[str]], name: str, usual: int | None) -> int:
    text = given.get(name, ["" if usual is None else str(usual)])[0]
    if not text.isdecimal() or len(text) > 12:
        raise BadRequest(f"{name} must be a whole number, as seconds since 1970 are.", param=name)
    return int(text)
