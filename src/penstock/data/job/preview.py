"""`--dry-run`: checks every row without an engine, and shows the first prompts as sent to the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.data.job.pending import RequestBuilder
from penstock.data.job.spec import JobSpec
from penstock.data.job.validation import check_custom_ids, check_new, detect_batch_lines, find_job_input
from penstock.data.results.outcome import Failure
from penstock.data.rows.request import RowRequest
from penstock.errors import BadRequest

if TYPE_CHECKING:
    from penstock.config import LLMConfig

_SHOWN_PROMPTS, _SHOWN_FAULTS = 3, 10


@dataclass(slots=True)
class Preview:
    """prompts: of the first rows, with row numbers. faults: the first ones, with row numbers. same: rows with
    the request of an earlier row, whose answer they reuse. skipped: rows without a request.
    note: why request bodies are shown instead of prompts.
    """

    rows: int = 0
    good: int = 0
    same: int = 0
    skipped: int = 0
    prompts: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    faults: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    note: str = ""


def preview(spec: JobSpec, config: LLMConfig | None = None) -> Preview:
    """Raises: what a run of the spec would raise before its first row."""
    check_new(spec)
    source = find_job_input(spec)
    spec = detect_batch_lines(spec, source)
    if spec.is_openai_batch:
        check_custom_ids(source)
    builder, found, keys = RequestBuilder(spec), Preview(), set[str]()
    template, found.note = _load_template(config)
    for row in islice(source.rows(), spec.limit):
        found.rows += 1
        try:
            pending = builder.pending_row(row)
            if pending is not None and len(found.prompts) < _SHOWN_PROMPTS:
                found.prompts.append((row.number, _prompt(pending.request, template)))
        except Exception as error:
            if len(found.faults) < _SHOWN_FAULTS:
                found.faults.append((row.number, Failure.from_error(error, "preprocess").message))
            continue
        if pending is None:
            found.skipped += 1
            continue
        found.good += 1
        if pending.key is not None:
            found.same += pending.key in keys
            keys.add(pending.key)
    return found


class _Body(msgspec.Struct):
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: Any = None
    input: Any = None


def _prompt(request: RowRequest, template: Any) -> str:
    """The prompt by the model's template; without one, the request's body. Raises: BadRequest."""
    try:
        body = msgspec.json.decode(request.body, type=_Body)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return request.body.decode(errors="replace")
    if body.messages is not None and template is not None:
        try:
            return template.apply_chat_template(
                body.messages, tools=body.tools, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a model's template raises what it likes, for unknown roles, say
            raise BadRequest(f"The model's chat template refuses the row: {error}") from error
    text = body.prompt if body.prompt is not None else body.input
    return text if isinstance(text, str) else request.body.decode(errors="replace")


def _load_template(config: LLMConfig | None) -> tuple[Any, str]:
    """A tokenizer with the model's chat template, from local files; or why there is none."""
    if config is None or config.engine_name == "sim":
        return None, "Request bodies are shown: the service makes the prompts."
    loading = config.model_loading_config
    source = loading.tokenizer_source
    where = Path(expanduser(source if isinstance(source, str) else config.model_source))
    if not where.is_dir():
        return None, f"Request bodies are shown: '{where}' is not on this machine yet."
    try:
        from transformers import AutoTokenizer

        found: Any = AutoTokenizer.from_pretrained(str(where))
    except Exception as error:
        return None, f"Request bodies are shown: the tokenizer cannot be read ({type(error).__name__})."
    if getattr(found, "chat_template", None) is None:
        return None, "Request bodies are shown: the model has no chat template."
    return found, ""
