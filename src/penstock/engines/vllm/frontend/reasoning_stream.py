"""Streams reasoning correctly when a delta holds several tokens.

When the front-end is busy, vLLM merges waiting outputs. Several of its reasoning parsers then treat the start
marker as part of the reasoning, or lose the text before it. Importing this file imports vLLM.

Work-around for vLLM 0.32: https://github.com/vllm-project/vllm/issues/55195. Remove when that is closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.reasoning import ReasoningParser, ReasoningParserManager


def read_alone(name: str) -> None:
    """Makes the parser of that name get the start marker in a delta of its own."""
    if name not in ReasoningParserManager.list_registered():
        return  # vLLM reports it itself
    given: Any = ReasoningParserManager.get_reasoning_parser(name)
    if given.engine_based_streaming or given.__module__ == __name__:
        return  # the first one finds markers itself

    class Alone(given):
        def extract_reasoning_streaming(
            self,
            previous_text: str,
            current_text: str,
            delta_text: str,
            previous_token_ids: Sequence[int],
            current_token_ids: Sequence[int],
            delta_token_ids: Sequence[int],
        ) -> DeltaMessage | None:
            text, ids = previous_text, list(previous_token_ids)
            deltas: list[DeltaMessage | None] = []
            for more_text, more_ids in cut(self, delta_text, delta_token_ids):
                after, after_ids = text + more_text, ids + more_ids
                deltas.append(
                    super().extract_reasoning_streaming(text, after, more_text, ids, after_ids, more_ids)
                )
                text, ids = after, after_ids
            return deltas[0] if len(deltas) == 1 else _joined(deltas)

    ReasoningParserManager.register_module(name, module=Alone)


def cut(parser: ReasoningParser, text: str, ids: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
    """Splits the delta before, at and after each marker; keeps it whole if its text shows fewer markers than
    its ids.
    """
    mark = parser.reasoning_start_str
    mark_id = parser.vocab.get(mark) if mark else None
    rest = list(ids)
    if not mark or mark_id not in rest or text.count(mark) != rest.count(mark_id):
        yield text, rest
        return
    while mark_id in rest:
        at = rest.index(mark_id)
        before, _, text = text.partition(mark)
        if at:
            yield before, rest[:at]
        yield mark, [mark_id]
        rest = rest[at + 1 :]
    if rest:
        yield text, rest


def _joined(deltas: Sequence[DeltaMessage | None]) -> DeltaMessage | None:
    parts = [part for part in deltas if part is not None]
    reasoning = "".join(part.reasoning or "" for part in parts)
    content = "".join(part.content or "" for part in parts)
    return DeltaMessage(reasoning=reasoning or None, content=content or None) if parts else None
