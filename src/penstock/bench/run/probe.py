"""Before any load: does the service answer, which model, what does it understand, how long is a word.

Everything that would make a run worthless is an error here, with the service's own words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from penstock.bench.load.client import Client, NotHTTP, Unreachable
from penstock.bench.load.conversations import RequestFormat, Workload
from penstock.bench.load.stream import Stream, message
from penstock.bench.load.target import Target
from penstock.bench.load.text import TWICE, TextSource, TokenScale, even_words
from penstock.bench.run.settings import BenchSettings
from penstock.errors import ConfigError, Error, ModelNotFound, Unauthorized, Unavailable

_TRIAL_TOKENS = 4
_TRIAL_WORDS = (32, 160)
_NOT_UNDERSTOOD = (400, 422)
_LOCKED = (401, 403)


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def probe(settings: BenchSettings) -> tuple[Workload, list[str]]:
    """The work as this service can be asked it, and what the user should know about it: asks for the models
    and for one or two short answers.

    Raises: Error that says what to do.
    """
    target, timeout_s = settings.target, settings.options.timeout
    client = Client(target)
    try:
        async with asyncio.timeout(timeout_s):
            return await _found(client, settings)
    except TimeoutError as error:
        raise Unavailable(f"{target.url} did not answer a trial request within {timeout_s:g} s.") from error
    except Unreachable as error:
        raise Unavailable(
            f"Nothing answers at {target.url} ({error}). Is the address right, and does the service run?"
        ) from error
    except NotHTTP as error:
        raise Unavailable(f"What answers at {target.url} does not speak HTTP. Is it https:// ?") from error
    except ConnectionError as error:
        raise Unavailable(f"{target.url} closed the connection without a whole answer.") from error
    finally:
        client.close()


async def _found(client: Client, settings: BenchSettings) -> tuple[Workload, list[str]]:
    model, work = settings.options.model, settings.work
    cards = await _models(client, settings.target, needed=model is None)
    card = next((card for card in cards if model in (None, card.id)), None)
    work = replace(work, form=replace(work.form, model=model or _id(card)))
    _refuse_too_long(work, card.max_model_len if card else None)
    notes: list[str] = []
    if not model and len(cards) > 1:
        notes.append(f"The service has {len(cards)} models; --model chooses one.")
    return await _tried(client, settings.target, work, notes), notes


async def _models(client: Client, target: Target, *, needed: bool) -> Sequence[_Card]:
    answer = Stream()
    await client.ask(target.head("GET", "/models"), b"", answer)
    heard = f"status {answer.status}"
    if answer.status == 200:
        try:
            return msgspec.json.decode(answer.body, type=_Cards).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            heard = "no list of models"
    if answer.status in _LOCKED:
        raise _unauthorized(answer.status, message(answer.body))
    if needed:
        raise Error(
            f"{target.url}/models answered with {heard}. Is the address right? --model names a model."
        )
    return ()


async def _tried(client: Client, target: Target, work: Workload, notes: list[str]) -> Workload:
    """The work in the richest wording that the service takes, and with its own measure of a word."""
    counts, work = await _first_answer(client, target, work, notes)
    if work.bodies:
        return work
    if counts:
        even = await _even_words(client, target, work.form.model)
        work = replace(work, words=even or work.words)
        trials = [(words, (await _ask(client, target, work, words))[0].usage) for words in _TRIAL_WORDS]
        short, long = ((words, usage.prompt_tokens or 0 if usage else 0) for words, usage in trials)
        work = replace(work, scale=TokenScale.of(short, long))
        if not even:
            notes.append("The service does not tokenize: a prompt has the tokens asked for on average only.")
    if not work.scale.exact:
        notes.append(
            "The service does not count prompt tokens: a word is taken for one, so lengths are rough."
        )
    return work


async def _even_words(client: Client, target: Target, model: str) -> tuple[str, ...]:
    """Words with the same number of tokens. None where the service does not tokenize as vLLM does."""
    answer, root = Stream(), replace(target, prefix=target.prefix.removesuffix("/v1"))
    asked = {"model": model, "prompt": TWICE, "add_special_tokens": False}
    try:
        await client.ask(root.head("POST", "/tokenize"), msgspec.json.encode(asked), answer)
        return even_words(msgspec.json.decode(answer.body, type=_Tokens).tokens)
    except (ConnectionError, msgspec.DecodeError, UnicodeDecodeError):
        return ()


async def _first_answer(
    client: Client, target: Target, work: Workload, notes: list[str]
) -> tuple[bool, Workload]:
    """Whether the service counts prompt tokens, and the work in the wording that got a good answer."""
    refused = ""
    for form in _wordings(work.form):
        stream, error = await _ask(client, target, replace(work, form=form), _TRIAL_WORDS[0])
        if not error:
            if work.form.ignore_eos and not form.ignore_eos:
                notes.append("The service does not know ignore_eos: answers may be shorter than asked.")
            if stream.usage is None:
                notes.append("The service gives no usage: events are counted instead of tokens.")
            counts = stream.usage is not None and stream.usage.prompt_tokens is not None
            return counts, replace(work, form=form)
        refused = refused or (f"{error}: {stream.detail}" if stream.detail else error)
        if stream.status in _LOCKED:
            raise _unauthorized(stream.status, stream.detail)
        if stream.status == 404:
            raise ModelNotFound(
                f"{target.url}{form.path} answered a trial request for model {form.model!r} with {refused}"
            )
        if stream.status not in _NOT_UNDERSTOOD:
            break
    raise Error(f"{target.url}{work.form.path} failed at a trial request: {refused}")


def _wordings(form: RequestFormat) -> list[RequestFormat]:
    """From all that we would like to the least, for services that refuse what they do not know."""
    forms = [form, replace(form, ignore_eos=False)]
    if form.chat:
        forms.append(replace(form, ignore_eos=False, limit="max_completion_tokens"))
    forms.append(replace(form, ignore_eos=False, usage=False))
    return [one for i, one in enumerate(forms) if one not in forms[:i]]


async def _ask(client: Client, target: Target, work: Workload, words: int) -> tuple[Stream, str]:
    text = TextSource(f"trial {work.salt}", work.words).cut(words, str(words))
    # The last body: it is asked latest, and a cache may hold it from now on.
    asked = msgspec.json.decode(work.bodies[-1], type=dict) if work.bodies else work.form.asked(text)
    stream = Stream()
    request = work.form.request(asked, _TRIAL_TOKENS)
    await client.ask(target.head("POST", work.form.path), request.body, stream)
    return stream, stream.error()


def _id(card: _Card | None) -> str:
    if card is None:
        raise Error("The service serves no model.")
    return card.id


def _refuse_too_long(work: Workload, context: int | None) -> None:
    if context is None or work.bodies:
        return
    if work.trace:
        longest = max(arrival.input_tokens + arrival.output_tokens for arrival in work.trace)
    else:
        turn = work.input.most + (work.output.most if work.output else 0)
        longest = work.shared_prefix + work.turns * turn
    if longest > context:
        raise ConfigError(
            f"Requests of up to {longest} tokens are asked for, but the model has room for {context}. "
            "Lower --input, --output, --turns or --shared-prefix, or choose another trace."
        )


def _unauthorized(status: int, reason: str) -> Unauthorized:
    return Unauthorized(
        f"The service answered with status {status}: {reason} "
        "Give the key with --api-key or in PENSTOCK_API_KEY."
    )
