"""`penstock.LLM`: an engine in this process, or a running service, that is kept between calls."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec
import uvloop

from penstock import tiers
from penstock.config import LLMConfig
from penstock.data.backends.protocol import Backend
from penstock.data.execution.window import Window
from penstock.data.results.columns import result_columns
from penstock.data.results.outcome import Failure, Outcome, failed
from penstock.data.rows.builder import build_request
from penstock.data.rows.request import Task
from penstock.data.rows.template import PromptTemplate, is_empty
from penstock.data.table import frames
from penstock.data.table.asking import bar, model_config, refuse_engine_arguments, with_schema
from penstock.errors import BadRequest, ConfigError, Error, Unavailable
from penstock.preflight import start
from penstock.processes.quiet import quiet

if TYPE_CHECKING:
    from concurrent.futures import Future

    from penstock.data.table.asking import Schema

    Ask = Callable[[Any], Mapping[str, Any]]

_CHAT = Task(token_ids=False)
_MOST_BEGUN = 4096
"""Rows of a table that are requests at a time; the window sends as many of them as the engine takes."""


_AT_EXIT: Callable[[Callable[[], object]], object] = getattr(threading, "_register_atexit", atexit.register)
"""While threads may still begin, which the end of an engine needs; `atexit` comes after that."""


class LLM:
    """One model, asked row by row, which is kept until `close`, the end of a `with` block or of the program.

    model: a folder or a hub id, for an engine in this process; with `url` a model of that service (its only
    one unless named). engine_kwargs: the engine's arguments, named as in `vllm serve`; or everything in a
    `config`. verbose: whether to show what the engine prints while it starts.
    Raises: ConfigError, EngineStartFailed; Unavailable when the service is not reached.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        url: str | None = None,
        api_key: str | None = None,
        config: LLMConfig | Mapping[str, Any] | None = None,
        verbose: bool = False,
        **engine_kwargs: Any,
    ) -> None:
        if config is not None and (model or url or engine_kwargs):
            other = "url" if url else "model" if model else ", ".join(engine_kwargs)
            raise ConfigError(f"{other}: not beside `config`, which says all of the engine. Leave one out.")
        if url:
            backend = _service(url, model, api_key, engine_kwargs)
        else:
            given = None if config is None else LLMConfig.from_argument(config, "config")
            backend = _engine(given or model_config(model, engine_kwargs))
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="llm")
        self._thread.start()
        self.close = weakref.finalize(self, _end, self._loop, self._thread, backend)
        """Ends the engine that it has started. Safe to call twice."""
        _AT_EXIT(self.close)
        try:
            with quiet(verbose or bool(url)):
                self._run(backend.start())
        except BaseException:
            self.close()
            raise
        self._window = Window(backend, exclusive=not url)

    def ask(
        self, prompt: str | Sequence[Mapping[str, Any]], *, schema: Schema | None = None, **params: Any
    ) -> Any:
        """The answer to one question or conversation: a text; with `schema` what it describes.

        schema: a Pydantic class, whose object is returned, or a JSON schema, whose value is.
        params: of the request, such as `max_tokens`. Raises: Error.
        """
        return _answer(self._run(self._outcome(prompt, _asking, with_schema(params, schema))), schema)

    def map(
        self,
        table: Any,
        prompt: str | None = None,
        *,
        system: str | None = None,
        schema: Schema | None = None,
        **params: Any,
    ) -> Any:
        """An answer for each row, in their order: a list, or a Series for a DataFrame of pandas or Polars.

        table: rows with the columns that `prompt` and `system` name in braces; without `prompt`, a list of
        questions or conversations, before each of which `system` goes. A row that is empty, or whose columns
        are, is None. So is one that failed; one warning says how many did and why.
        schema, params: as in `ask`. Raises: ConfigError, before anything is asked; Unavailable when nothing
        answers any more.
        """
        asking = with_schema(params, schema)
        if prompt is None:
            rows, is_blank, ask = _with_system(frames.questions(table), system), is_empty, _asking
        else:
            template = PromptTemplate(prompt, system=system)
            rows, is_blank, ask = frames.rows(table, template), template.is_blank, template.fields
        blank = {number for number, row in enumerate(rows) if is_blank(row)}
        asked = [row for number, row in enumerate(rows) if number not in blank]
        outcomes = iter(self._run(self._outcomes(asked, ask, asking)))
        answers, failures = [], []
        for number in range(len(rows)):
            try:
                answers.append(None if number in blank else _answer(next(outcomes), schema))
            except Error as error:
                answers.append(None)
                failures.append(f"row {number}: {error}")
        if failures:
            warnings.warn(
                f"{len(failures)} of {len(answers)} rows have no answer, such as {failures[0]}", stacklevel=2
            )
        return frames.series(table, answers)

    async def _outcome(self, row: Any, ask: Ask, params: Mapping[str, Any]) -> Outcome:
        try:
            request = build_request(ask(row), _CHAT, params)
        except Exception as error:  # also what the objects in a row raise: it fails this row alone
            return failed(Failure.from_error(error, "preprocess"))
        return await self._window.run(request)

    async def _outcomes(self, rows: Sequence[Any], ask: Ask, params: Mapping[str, Any]) -> list[Any]:
        tasks: list[asyncio.Task[Any]] = []
        begun = asyncio.Semaphore(_MOST_BEGUN)

        def ended(_: asyncio.Task[Any]) -> None:
            begun.release()
            shown.update()

        with bar(len(rows)) as shown:
            async with asyncio.TaskGroup() as group:
                for row in rows:
                    await begun.acquire()
                    tasks.append(group.create_task(self._outcome(row, ask, params)))
                    tasks[-1].add_done_callback(ended)
        return [task.result() for task in tasks]

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        if not self.close.alive:
            work.close()
            raise Unavailable("This LLM is closed.")
        running: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseExceptionGroup as errors:  # all rows end for the same reason
            raise errors.exceptions[0] from None
        finally:
            running.cancel()  # on Ctrl-C

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _service(
    url: str, model: str | os.PathLike[str] | None, api_key: str | None, engine_kwargs: Mapping[str, Any]
) -> Backend:
    from penstock.data.backends.openai_service import OpenAIService

    refuse_engine_arguments(engine_kwargs)
    name = None if model is None else str(model)
    return OpenAIService(url, api_key=api_key, model=name, headers={tiers.HEADER: tiers.DEFAULT})


def _engine(config: LLMConfig) -> Backend:
    from penstock.data.backends.in_process import in_process_engine

    start.refuse(config)
    return in_process_engine(config)


async def _stop(backend: Backend) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
    await backend.stop()


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, backend: Backend) -> None:
    try:
        asyncio.run_coroutine_threadsafe(_stop(backend), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _asking(question: Any) -> Mapping[str, Any]:
    return {"messages": _messages(question)}


def _messages(question: Any) -> Any:
    return [{"role": "user", "content": question}] if isinstance(question, str) else question


def _with_system(questions: list[Any], system: str | None) -> list[Any]:
    """Conversations that begin with `system`. Raises: ConfigError where one has its own."""
    if system is None:
        return questions
    before = {"role": "system", "content": system}
    found = [question if is_empty(question) else _messages(question) for question in questions]
    for number, messages in enumerate(found):
        if isinstance(messages, list) and any(_is_system(one) for one in cast("list[Any]", messages)):
            raise ConfigError(f"Row {number} has a system message of its own; leave out one of the two.")
    return [[before, *messages] if isinstance(messages, list) else messages for messages in found]


def _is_system(message: Any) -> bool:
    return isinstance(message, Mapping) and cast("Any", message).get("role") in ("system", "developer")


def _answer(outcome: Outcome, schema: Schema | None) -> Any:
    """Raises: Error."""
    found = result_columns(_CHAT, outcome)
    if found["error"] is not None:
        raise Failure(**found["error"]).to_error()
    text: str = found["generated_text"]
    if schema is None:
        return text
    try:
        return schema.model_validate_json(text) if isinstance(schema, type) else msgspec.json.decode(text)
    except ValueError as error:  # also what Pydantic and msgspec raise
        is_cut = found["finish_reason"] == "length"
        why = "it was cut at max_tokens" if is_cut else str(error).splitlines()[0]
        raise BadRequest(f"The answer does not fit the schema: {why}. It is {text!r:.200}") from error
