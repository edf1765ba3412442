"""Checks a model's tokenizer and chat template while its core loads.

A fault in them would otherwise show in every client's first request, as the client's own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

log = logging.getLogger(__name__)

_TEXT = "Hello"
_CHAT = [{"role": "user", "content": _TEXT}]


def check(tokenizer: Any, source: str, template: str | None) -> None:
    """Checks the model's tokenizer and the chat template in its place, a file or a text.

    source: the tokenizer's folder. Raises: ValueError, naming the file at fault.
    """
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ValueError(
            f"the tokenizer in '{source}' has no vocabulary. Its tokenizer.json or tokenizer.model is "
            "missing or empty."
        )
    if not tokenizer.encode(_TEXT, add_special_tokens=False):
        log.warning("The tokenizer in '%s' makes no tokens of the text '%s'.", source, _TEXT)
    for where, text in _templates(tokenizer, source, template):
        try:
            tokenizer.apply_chat_template(_CHAT, chat_template=text, tokenize=False)
        except TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template in '{where}' has an error in line {error.lineno}: {error.message}"
            ) from error
        except Exception as error:  # it may refuse this chat and take others
            log.info("The chat template in '%s' refused a chat: %s", where, error)


def _templates(tokenizer: Any, source: str, template: str | None) -> Iterator[tuple[str, str]]:
    """Each chat template of the model, and where it comes from."""
    if template is not None:
        try:
            yield template, Path(template).read_text()
        except OSError:  # not a file
            yield "chat_template", template
        return
    found: Any = getattr(tokenizer, "chat_template", None) or {}
    for text in found.values() if isinstance(found, dict) else [found]:
        yield source, text
