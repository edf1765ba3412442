"""A request's body: read within limits, and scanned just enough to find the model.

The body goes to the replica byte for byte once it is complete: `model` may come last, and does with OpenAI's
own client. It is held until the response has begun, in case another replica must take over; of a stream that
another one could continue, to the end.
"""

from __future__ import annotations

import asyncio
import codecs
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from operator import attrgetter
from typing import TypeVar

import msgspec

from penstock import tiers
from penstock.asgi import ClientGone, Receive
from penstock.errors import BadRequest, Forbidden, Overloaded, TooLarge
from penstock.openai import cache_salt
from penstock.openai.errors import unreadable
from penstock.serve.gateway.tenants.meter import Asked
from penstock.serve.http import limits
from penstock.transport.link import BYTES_PER_TOKEN

_MODEL_FIELD = re.compile(rb'[ ;]name="?model"?(;|\r|$)')
_BOUNDARY = re.compile(rb';[ \t]*boundary=("([^"]*)"|[^; \t]*)', re.IGNORECASE)
_MOST_BOUNDARY = 70  # RFC 2046, 5.1.1
_AFTER_BOUNDARY = (b"\r\n", b" ", b"\t")
_MOST_PART_HEADERS = 1024
_SLICE_BYTES = 256 * 1024  # looked through at a time
_LARGE_BYTES = 4 * 2**20
_RETRY_AFTER_S = 1
_MOST_DIGITS = 12
_ANSWER_LIMIT = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/messages": ("max_tokens",),
}
"""Fields that limit an answer, by path; the first is set where none is."""

_GENERATE = frozenset(
    (
        "/v1/generate",
        "/inference/v1/generate",
        "/v1/systemone",
        "/cohere/v2/chat",
        "/v1/chat/completions/batch",
    )
)
"""Other paths with answers."""

_SEVERAL = {
    "/v1/completions": "prompt",
    "/v1/chat/completions/batch": "messages",
    **dict.fromkeys(("/v1/embeddings", "/pooling", "/classify"), "input"),
}
"""Fields that may have several prompts, by path."""

_SLOW_S = 5.0
_MOST_LOOKED_AT = 1024  # bodies, when one of those that wait has to give up its memory


_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NONE = msgspec.Raw()
_IDS = re.compile(rb"\[\s*(\[\s*)?\d")
_LIST = re.compile(rb"\[\s*[\"\[{]")
_MEDIA = b";base64,"
_IMAGE = re.compile(rb'"(?:image_url|image_embeds)"\s*:|"type"\s*:\s*"image"')  # OpenAI's parts; Anthropic's
_taken = attrgetter("taken")

T = TypeVar("T")


class Fields(msgspec.Struct, frozen=True, gc=False):
    """The fields that the gateway reads; msgspec skips the others without building them.

    Raw fields are slices of the body's bytes, not validated here: the engine reports what is wrong with them.
    """

    model: str | None = None
    tools: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    prompt_token_ids: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE
    cache_salt: msgspec.Raw = _NONE
    prompt_cache_key: msgspec.Raw = _NONE
    user: msgspec.Raw = _NONE
    previous_response_id: msgspec.Raw = _NONE
    service_tier: msgspec.Raw = _NONE
    priority: msgspec.Raw = _NONE
    background: msgspec.Raw = _NONE
    stream: msgspec.Raw = _NONE
    stream_options: msgspec.Raw = _NONE
    max_tokens: msgspec.Raw = _NONE
    max_completion_tokens: msgspec.Raw = _NONE
    max_output_tokens: msgspec.Raw = _NONE
    n: msgspec.Raw = _NONE


_decode = msgspec.json.Decoder(Fields).decode
_decode_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_raw = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class NoRoom(Overloaded):
    """The memory for bodies is needed for other requests."""


class BodyBudget:
    """Memory for the bodies of all open requests of one gateway. Units: bytes.

    A body that is only held in case its stream breaks gives up its share to others, the oldest first. So does
    an incomplete one without progress for `_SLOW_S`, and the largest of the bodies that wait for a replica of
    the model whose bodies take most, for one of at most half its size.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.coming: OrderedDict[RequestBody, float] = OrderedDict()
        """Incomplete ones: when each last made progress, oldest first."""
        self.waiting: dict[RequestBody, str] = {}
        """Complete ones that wait for a replica, and the model that it is of."""
        self.spare: OrderedDict[RequestBody, None] = OrderedDict()
        """Those of streams that have begun."""

    def take(self, size: int, body: RequestBody) -> None:
        """Reserves `size` more for `body`. Raises: Overloaded when that does not fit."""
        while self.used + size > self.limit and self.spare:
            next(iter(self.spare)).drop()
        while self.used + size > self.limit:
            slowest = next(iter(self.coming), None)
            if slowest in (None, body) or time.monotonic() - self.coming[slowest] < _SLOW_S:
                slowest = self._largest(2 * max(body.expected, body.taken + size))
            if slowest is None:
                raise self.full()
            slowest.give_up()
        self.used += size

    def _largest(self, least: int) -> RequestBody | None:
        """A body of at least `least` bytes that waits, of the model whose waiting bodies take most."""
        taken = Counter[str]()
        for body, model_id in self.waiting.items():
            taken[model_id] += body.taken
        most = max(taken, key=taken.__getitem__, default=None)
        bodies = [body for body, model_id in self.waiting.items() if model_id == most]
        largest = max(bodies, key=_taken, default=None)
        return largest if largest is not None and largest.taken >= least else None

    def progress(self, body: RequestBody) -> None:
        """`body` is incomplete and has just made progress."""
        self.coming[body] = time.monotonic()
        self.coming.move_to_end(body)

    def full(self) -> NoRoom:
        """The error for requests that do not fit."""
        return NoRoom(
            f"The bodies of all open requests would be larger than {self.limit} bytes, the limit of this "
            "server (max_bodies_bytes). Try again later.",
            retry_after_s=_RETRY_AFTER_S,
        )


class RequestBody:
    """One request's body, from `read` to `drop`, and its fields."""

    __slots__ = ("_budget", "_holder", "_model_at", "content", "expected", "fields", "is_object", "taken")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.expected = self.taken = 0  # bytes: as its head says; as it has come
        self._holder: asyncio.Task[object] | None = None  # while it waits, for more or for a replica
        self.content: bytes | bytearray = b""
        self.fields = Fields()
        self.is_object = False  # of JSON
        self._model_at: slice | None = None  # of a form

    async def read(self, receive: Receive, content_length: int | None, limit: int) -> None:
        """Reads the body to its end. limit: in bytes.

        Raises: TooLarge and Overloaded as soon as they are known, ClientGone.
        """
        limit = min(limit, self._budget.limit)
        self.expected = content_length or 0
        _check(self.expected, limit)
        if not await self._receive(receive, limit):
            return
        budget, begun = self._budget, 0
        budget.progress(self)
        try:
            while await self._may_give_up(self._receive(receive, limit)):
                if len(self.content) - begun >= limits.BODY_PROGRESS_BYTES:
                    begun = len(self.content)
                    budget.progress(self)
        finally:
            budget.coming.pop(self, None)

    async def while_waiting(self, model_id: str, replica: Awaitable[T]) -> T:
        """Awaits `replica`, a replica of the model. Raises: NoRoom when others need the memory."""
        budget = self._budget
        if self.taken >= budget.limit // _MOST_LOOKED_AT:  # small ones are not worth looking at
            budget.waiting[self] = model_id
        try:
            return await self._may_give_up(replica)
        finally:
            budget.waiting.pop(self, None)

    async def _may_give_up(self, wait: Awaitable[T]) -> T:
        """Awaits `wait`. Raises: NoRoom after `give_up`."""
        self._holder = task = asyncio.current_task()
        assert task is not None
        try:
            return await wait
        except asyncio.CancelledError:
            if self._holder is not None or task.uncancel():  # its client has gone, too
                raise
            raise self._budget.full() from None
        finally:
            self._holder = None

    async def _receive(self, receive: Receive, limit: int) -> bool:
        """Reads one piece; returns whether there are more. Raises: as `read`."""
        message = await receive()
        if message["type"] != "http.request":
            raise ClientGone
        piece: bytes = message.get("body", b"")
        more: bool = message.get("more_body", False)
        size = len(self.content) + len(piece)
        _check(size, limit)
        self._budget.take(size - self.taken, self)
        self.taken = size
        if self.content:
            self.content += piece
        else:  # grows in place: joining kept pieces would need twice the memory
            self.content = bytearray(piece) if more else piece
        return more

    def spare(self) -> None:
        """From now on others may have its memory: it is dropped then."""
        self._budget.spare[self] = None

    def need(self) -> None:
        """Takes `spare` back."""
        self._budget.spare.pop(self, None)

    def give_up(self) -> None:
        """Ends the request while it waits: its memory is needed for others."""
        self.drop()
        holder, self._holder = self._holder, None
        assert holder is not None
        holder.cancel()

    async def look(self, content_type: bytes, free: bool = False) -> None:
        """Finds `fields`: of a form, or of a JSON object.

        free: a body of any other content type is accepted and has no fields.
        Raises: BadRequest when the body is neither, or `model` is not a string; TooLarge.
        """
        if content_type.lower().startswith(b"multipart/form-data"):
            self._model_at = at = await _form_model(self.content, content_type)
            self.fields = Fields(self.content[at].decode(errors="replace") or None if at else None)
            return
        if not free:
            if self.content.startswith(codecs.BOM_UTF8):
                self.content = self.content.removeprefix(codecs.BOM_UTF8)
            self.is_object = bool(self.content)
        if free and content_type and b"json" not in content_type.lower():
            return
        if len(self.content) > _LARGE_BYTES:
            await _check_items(self.content)
        self.fields = fields(self.content)

    def asked(self, path: str, most: int | None, longest: int | None) -> Asked:
        """What the request may take. most: of an answer, for one that does not say; it is then written into
        the body. longest: the model's context window.

        Raises: BadRequest for a longer answer than `most`, and for what engines may read as another number
        than the gateway, or as a stream; Forbidden.
        """
        fields, names = self.fields, _ANSWER_LIMIT.get(path)
        streams, prompt = bytes(fields.stream) == b"true", self.prompt_tokens()
        has_images = b"image" in self.content  # said in half the time
        images = len(_IMAGE.findall(fields.messages or fields.input)) if has_images else 0
        generates, count = names is not None or path in _GENERATE, self._prompts(path)
        if longest is not None and (generates or path in _SEVERAL):  # others take any number of texts
            prompt = min(prompt, longest * count)
        if not generates:
            return Asked(prompt, 0, streams, images=images)
        if not streams and bytes(fields.stream) not in (b"", b"false", b"null"):
            raise BadRequest("stream must be true or false.", param="stream")
        if names is None:
            if most is not None:
                raise Forbidden(
                    f"This key's answers have a limit of {most} tokens, which {path} cannot keep."
                )
            return Asked(prompt, None, streams, images=images)
        numbers = [number for name in names if (number := _number(name, getattr(fields, name)))]
        answer = max(numbers, default=None)
        if most is not None:
            if answer is None:
                self._replace({names[0]: most, **dict.fromkeys(names[1:])})
                answer = most
            elif answer > most:
                raise BadRequest(
                    f"The request asks for {answer} tokens; this key may ask for {most}.", param=names[0]
                )
        if answer is not None:
            answer *= count * (_number("n", fields.n) or 1)
        return Asked(prompt, answer, streams, images=images)

    def _prompts(self, path: str) -> int:
        """Each is as long as the context window at most, and has an answer of its own. Raises: BadRequest."""
        raw = getattr(self.fields, _SEVERAL.get(path, ""), _NONE)
        return len(_parsed(_decode_list, raw)) if _LIST.match(raw) else 1

    def prompt_tokens(self) -> int:
        """An estimate by the length of the body; exact for a prompt of token ids. Pictures and sounds in it
        count nothing, nor does a form.
        """
        if not self.is_object:
            return 0
        fields, content, left_out = self.fields, self.content, 0
        if not fields.messages:
            for raw in (fields.prompt_token_ids, fields.prompt, fields.input):
                if raw and _IDS.match(raw):
                    return bytes(raw).count(b",") + 1
        at = content.find(_MEDIA)
        while at >= 0 and (end := content.find(b'"', at)) >= 0:
            left_out += end - at
            at = content.find(_MEDIA, end)
        return (len(content) - left_out) // BYTES_PER_TOKEN

    def ask_for_usage(self) -> bool:
        """Has a stream end with its usage. Returns whether the client has not asked for that itself."""
        given, options = bytes(self.fields.stream_options), {}
        if given and given != b"null":
            options = _parsed(msgspec.json.decode, given)
            if not isinstance(options, dict) or options.get("include_usage") is True:
                return False
        self._set("stream_options", {**options, "include_usage": True})
        return True

    def salt(self, tenant: str, path: str) -> None:
        """Keeps the request's part of the prefix cache its tenant's own. Raises: Forbidden."""
        if self.is_object:
            for field, value in cache_salt.salted(tenant, path, bytes(self.fields.cache_salt)).items():
                self._set(field, value)
                self.fields = msgspec.structs.replace(
                    self.fields, cache_salt=msgspec.Raw(b'"%b"' % value.encode())
                )

    def _set(self, field: str, value: object) -> None:
        """Sets one of `Fields`; at the end of the object, which is not empty, if it is not there."""
        if getattr(self.fields, field):
            self._replace({field: value})
        else:
            self.content = b'%b,"%b":%b}' % (
                self.content.rstrip()[:-1],
                field.encode(),
                msgspec.json.encode(value),
            )

    def name_model(self, model: str) -> None:
        """Names another model in the body, if it names one; all else stays byte for byte, but for spaces
        around the keys of JSON.
        """
        if self._model_at is not None:
            content, at, name = self.content, self._model_at, model.encode()
            self.content = content[: at.start] + name + content[at.stop :]
            self._model_at = slice(at.start, at.start + len(name))
        elif self.fields.model is not None:
            self._replace({"model": model})

    def name_tier(self, tier: str | None) -> None:
        """Names the class that the request was given, or none. Engines see no `priority`. All else stays, as
        in `name_model`.
        """
        word = msgspec.json.encode(tier) if tier else b""
        if self.fields.priority or bytes(self.fields.service_tier) != word:
            self._replace({tiers.FIELD: tier or None, "priority": None})

    def store_nothing(self) -> None:
        """Has the engine forget the response, as if the client had asked for that."""
        self._replace({"store": False})

    def _replace(self, values: Mapping[str, object]) -> None:
        """Sets fields of the JSON object; None removes one. Raises: BadRequest."""
        given = _parsed(_decode_raw, self.content)
        new = {
            name: msgspec.Raw(msgspec.json.encode(value))
            for name, value in values.items()
            if value is not None
        }
        left = {name: value for name, value in given.items() if values.get(name, "") is not None}
        self.content = msgspec.json.encode(left | new)

    def twin(self) -> RequestBody | None:
        """The same for a request that others must not wait for; None where it does not fit."""
        twin, budget = RequestBody(self._budget), self._budget
        if budget.used + self.taken > budget.limit:
            return None
        budget.used += self.taken
        twin.taken, twin.content, twin.is_object = self.taken, bytes(self.content), self.is_object
        twin.fields = fields(twin.content)
        return twin

    def drop(self) -> None:
        """Releases the memory, and the fields, which are views of it. Safe to call twice."""
        self.content, self.fields = b"", Fields()
        self._budget.coming.pop(self, None)
        self.need()
        self._budget.used -= self.taken
        self.taken = 0


def _number(name: str, raw: msgspec.Raw) -> int | None:
    """A field's whole number from 1; None where there is none, or a smaller one, which the engine refuses.
    Raises: BadRequest.
    """
    text = bytes(raw)
    if not text or text == b"null" or text.startswith(b"-"):
        return None
    if not text.isdigit() or len(text) >= _MOST_DIGITS:
        raise BadRequest(f"{name} must be a whole number of fewer than {_MOST_DIGITS} digits.", param=name)
    return int(text) or None


def _check(size: int, limit: int) -> None:
    if size > limit:
        raise TooLarge(
            f"The request body is larger than {limit} bytes, the limit of this server (max_body_bytes)."
        )


def _parsed(decode: Callable[[bytes | bytearray], T], body: bytes | bytearray) -> T:
    """Raises: BadRequest."""
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise unreadable(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if body.startswith(_UTF_16):
            raise BadRequest("The request body is UTF-16; send it as UTF-8.") from None
        raise BadRequest(f"The request body is not valid JSON: {error}.") from None
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.") from None


def fields(body: bytes | bytearray) -> Fields:
    """Fields of a JSON object, or none. Raises: BadRequest."""
    return _parsed(_decode, body) if body else Fields()


async def _check_items(body: bytes | bytearray) -> None:
    """Decoding long arrays and objects would block the event loop."""
    items = 0
    for start in range(0, len(body), _SLICE_BYTES):
        items += body.count(b",", start, start + _SLICE_BYTES)
        if items > limits.JSON_ITEMS:
            raise TooLarge(
                f"The request body has more than {limits.JSON_ITEMS} commas, the limit of this server. "
                "Send it in several requests."
            )
        await asyncio.sleep(0)


async def _form_model(body: bytes | bytearray, content_type: bytes) -> slice | None:
    """Where a multipart form has the value of `model`. RFC 2046, 5.1.1.

    Skips from boundary to boundary, so that megabytes of audio cost little.
    Raises: BadRequest when the content type has no valid boundary, or there are too many parts.
    """
    found = _BOUNDARY.search(content_type)
    boundary = (found[2] if found[2] is not None else found[1]) if found else b""
    if not boundary:
        raise BadRequest("The content type multipart/form-data names no boundary.")
    if len(boundary) > _MOST_BOUNDARY:
        raise BadRequest(f"The boundary of multipart/form-data is longer than {_MOST_BOUNDARY} characters.")
    delimiter = b"\r\n--" + boundary
    at = -2 if body.startswith(delimiter[2:]) else await _find(body, delimiter, 0)  # as if after a line
    for _ in range(limits.FORM_PARTS):
        if at == -1:
            return None
        start = at + len(delimiter)
        end = body.find(b"\r\n\r\n", start, start + _MOST_PART_HEADERS)
        if end >= 0 and body.startswith(_AFTER_BOUNDARY, start) and _MODEL_FIELD.search(body[start:end]):
            start = end + 4
            value = body[start : start + limits.NAME_CHARS + 1].split(b"\r\n")[0]
            return slice(start, start + len(value))
        if body.startswith(b"--", start):
            return None
        at = await _find(body, delimiter, start)
    raise BadRequest(
        f"None of the first {limits.FORM_PARTS} parts of the form is 'model'; send it before the others.",
        param="model",
    )


async def _find(body: bytes | bytearray, delimiter: bytes, start: int) -> int:
    """Like `bytes.find`, which can take seconds, but yields to the event loop meanwhile."""
    while start < len(body):
        at = body.find(delimiter, start, start + _SLICE_BYTES + len(delimiter))
        if at >= 0:
            return at
        start += _SLICE_BYTES
        await asyncio.sleep(0)
    return -1
