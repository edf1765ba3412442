"""The engines' own metrics, fetched from every replica at request time and merged under a `replica` label."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from penstock.serve.fleet.links import ReplicaLinks
from penstock.serve.fleet.replica import Replica

log = logging.getLogger(__name__)

_LIMIT_S = 2.0  # for all replicas together; the slow ones are left out


async def scrape(replicas: Sequence[Replica], links: ReplicaLinks) -> bytes:
    """Prometheus text of all `replicas` that answer in time."""
    texts = await asyncio.gather(*(_text(replica, links) for replica in replicas))
    named = {replica.id: text for replica, text in zip(replicas, texts, strict=True) if text}
    return await asyncio.to_thread(merge, named)


async def _text(replica: Replica, links: ReplicaLinks) -> str:
    try:
        return (await links.get(replica, "/metrics", _LIMIT_S)).decode(errors="replace")
    except (OSError, TimeoutError) as error:
        log.info("replica %s gave no metrics: %s", replica.id, error or "too slow")
        return ""


def merge(texts: dict[str, str]) -> bytes:
    """Merges many texts: each family is declared once, each sample is labelled with its replica."""
    declared: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica_id, text in texts.items():
        family, seen = "", set[str]()
        for line in text.splitlines():
            if line.startswith("#"):
                family = _family(line) or family
                if family not in declared or family in seen:
                    seen.add(family)
                    declared.setdefault(family, []).append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, replica_id))
    lines = [line for family, found in samples.items() for line in declared.get(family, []) + found]
    return "\n".join([*lines, ""]).encode() if lines else b""


def _family(comment: str) -> str | None:
    """`# HELP name ...` and `# TYPE name ...` name the family of the samples that follow."""
    words = comment.split(maxsplit=3)
    return words[2] if len(words) > 2 and words[1] in ("HELP", "TYPE") else None


def _labelled(sample: str, replica_id: str) -> str:
    """`name 1` and `name{a="b"} 1` with one label more."""
    label = f'replica="{replica_id}"'
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space or (brace >= 0 and space < 0):
        comma = "" if sample[brace + 1 : brace + 2] == "}" else ","
        return f"{sample[: brace + 1]}{label}{comma}{sample[brace + 1 :]}"
    return f"{sample[:space]}{{{label}}}{sample[space:]}"
