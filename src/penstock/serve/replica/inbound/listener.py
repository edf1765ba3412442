"""The replica's listener: the sockets on which gateways reach its engine, and the ASGI app behind them.

It stands between a gateway's relay and the engine's app: authentication, drain, death. It lets a gateway tell
an engine's death from an error: a request whose engine died before its first byte is marked for another
replica, one whose engine died later is cut off, whatever the engine's app sends. It knows neither Ray nor
clients, whose keys and limits are the gateway's.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice
from urllib.parse import unquote

from penstock import asgi, tiers
from penstock.asgi import OWN, TRUSTED, ASGIApp, Receive, Scope, Send
from penstock.errors import EngineDead, Error, Forbidden, Unavailable
from penstock.layers.adapters import Store
from penstock.openai.asgi_response import send_body, send_error, send_json
from penstock.openai.response_items import keeper_name
from penstock.request_context import created, current_replica, id_seed, start_tag, tier, tokens_before
from penstock.serve.http import direct_writer
from penstock.serve.http.private_listener import PrivateListener
from penstock.serve.replica.inbound.engine_response import EngineResponse
from penstock.serve.replica.inbound.rows import HandOver, RowReceiver
from penstock.serve.replica.inbound.status_link import StatusLinks, StatusSource
from penstock.serve.tenancy.fairness import StartTags
from penstock.transport import continuation, link, multiplexer, rows
from penstock.transport.connection import STREAM
from penstock.transport.continuation import CONTINUE, Continuation, Origin
from penstock.transport.link import ADAPTER, ALIASES
from penstock.transport.multiplexer import StreamSender

log = logging.getLogger(__name__)

_REQUESTS_AT_ONCE = 4  # to prepare a request takes about a millisecond, while the tokens of all others wait
_HAND_OVER_S = 1.0
"""Between two times at which gateways get the tokens of answers that have not begun."""

_DRAIN_S = 0.5  # gateways know within milliseconds; requests already on their way are still served


class Listener:
    """ASGI around the engine's app, and its sockets. Made by `open`; ended by `drain` and `close`."""

    def __init__(self, app: ASGIApp, source: StatusSource, sockets: PrivateListener) -> None:
        self._app = app
        self._source = source
        self.sockets = sockets
        self.address = sockets.own_address
        self._secret = self.address.secret.encode()
        self._tasks: list[asyncio.Task[None]] = []
        self._refusal: Unavailable | None = None
        self._open_by_gateway: Counter[bytes] = Counter()
        self._multiplexers: dict[bytes, StreamSender] = {}
        self._row_receivers: set[RowReceiver] = set()
        self.open_requests: dict[asyncio.Task[object], EngineResponse] = {}
        self._prompts: dict[EngineResponse, int] = {}  # of online requests, in the order of their arrival
        self._tags = {work: StartTags() for work in tiers.ENGINE_PRIORITY}
        self.links = StatusLinks(source, self._open_elsewhere, self._tokens_before_engine, self.open_requests)

    @classmethod
    async def open(
        cls,
        app: ASGIApp,
        source: StatusSource,
        *,
        node_id: str,
        node_host: str | None,
        replica_id: str | None = None,
        wait_dead: Callable[[], Awaitable[str]] | None = None,
    ) -> Listener:
        """Listens on an abstract Unix socket; reserves a port on `node_host`, without listening yet.

        wait_dead: returns once the engine has died. replica_id: random unless given.
        """
        sockets = PrivateListener(replica_id or secrets.token_hex(8), node_id, node_host)
        listener = cls(app, source, sockets)
        await sockets.listen(listener, _REQUESTS_AT_ONCE)
        listener._tasks.append(asyncio.create_task(listener._hand_over()))
        if wait_dead is not None:
            listener._tasks.append(asyncio.create_task(listener._die_with(wait_dead)))
        return listener

    async def drain(self, timeout_s: float) -> int:
        """Reports it on every link, refuses new requests after `_DRAIN_S`, waits for the open ones.

        Returns the number of requests that were still open after `timeout_s` and were cut. Does not wait
        for a dead engine.
        """
        deadline = time.monotonic() + (0.0 if isinstance(self._refusal, EngineDead) else timeout_s)
        self.links.drain()
        await asyncio.sleep(min(_DRAIN_S, _left_s(deadline)))
        self.refuse()
        if self.open_requests:
            await asyncio.wait(list(self.open_requests), timeout=_left_s(deadline))
        return self._cut()

    async def close(self) -> None:
        """Ends the links and open requests, and closes the sockets. Safe to call twice."""
        self.refuse()
        self._cut()
        self._end_links()
        for task in self._tasks:
            task.cancel()
        await self.sockets.close(grace_s=0.5)

    def refuse(self) -> None:
        """New requests are answered 503, marked for another replica."""
        self._refusal = self._refusal or Unavailable("This replica is shutting down.")

    def die(self, reason: str) -> None:
        """The engine is dead: ends the links and all open requests."""
        log.error("The engine died (%s); %d open requests fail.", reason, len(self.open_requests))
        self._refusal = EngineDead("The engine behind this replica died.")
        self._end_links()
        self._cut()

    async def _die_with(self, wait_dead: Callable[[], Awaitable[str]]) -> None:
        self.die(await wait_dead())

    async def _hand_over(self) -> None:
        """So that a gateway can have them continued where this process dies."""
        while True:
            await asyncio.sleep(_HAND_OVER_S)
            self._hand_over_now()

    def _hand_over_now(self) -> None:
        """Not in `_hand_over`, whose variables would hold the last response and request until the next."""
        for response in self.open_requests.values():
            try:
                response.hand_over()
            except Exception:
                log.exception(
                    "an answer's tokens could not be handed over; if this process dies, it begins anew"
                )

    def _end_links(self) -> None:
        """Every gateway takes this replica for dead."""
        self.links.end()
        for one in (*self._multiplexers.values(), *self._row_receivers):
            one.close()

    def _cut(self) -> int:
        """Ends all open requests; returns their number."""
        for task, response in self.open_requests.items():
            response.cut()
            task.cancel()
        return len(self.open_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = dict(scope["headers"])
        if not hmac.compare_digest(fields.get(link.SECRET, b""), self._secret):
            return await send_error(send, Forbidden("Only gateways may ask here."), scope["path"])
        if (writer := direct_writer.of(scope)) is not None:
            writer.accept()
        gateway = fields.get(link.GATEWAY, b"")
        if ALIASES in fields and scope["path"] in (link.PATH, link.ALIASES_PATH):
            self._source.add_aliases(map(unquote, fields[ALIASES].decode().split(",")))
        if scope["path"] == link.ALIASES_PATH:
            return await send_body(send, b"")
        if scope["path"] == link.PATH:
            return await self.links.serve(gateway, receive, send)
        if scope["path"] == multiplexer.PATH:
            return await self._multiplex(gateway, receive, send)
        if scope["path"] == rows.PATH:
            return await self._serve_rows(gateway, receive, send)
        if scope["path"] == link.ADAPTERS_PATH:
            return await _list(send, self._source.adapters)
        scope["headers"] = [
            field for field in scope["headers"] if field[0] == ADAPTER or not field[0].startswith(OWN)
        ]
        scope["extensions"] = {**scope.get("extensions", {}), TRUSTED: {}}
        work, number = tiers.read(fields.get(link.TIER)), int(fields.get(STREAM, 0))
        given = Continuation.from_header(fields[CONTINUE]) if CONTINUE in fields else None
        tenant, share = fields.get(link.TENANT, b""), fields.get(link.SHARE, b"")
        return await self._run(gateway, scope, receive, send, work, number, given, tenant, share)

    async def _run(
        self,
        gateway: bytes,
        scope: Scope,
        receive: Receive,
        send: Send,
        work: tiers.Tier,
        number: int = 0,
        given: Continuation | None = None,
        tenant: bytes = b"",
        share: bytes = b"",
        take: HandOver | None = None,
    ) -> None:
        """work: the request's class. number: of its stream on the multiplexed connection, if it has one.
        given: of a stream that goes on here. tenant: what the id of a stored response says of it.
        share: as the header. take: for the tokens of a row, if its job keeps them.
        """
        if self._refusal is not None:
            await send_error(send, self._refusal, scope["path"], link.turned_away(link.UNTOUCHED))
            return
        origin = self._origin(given, kept=bool(number or take))
        if origin is None and given is not None:
            error = Unavailable("This replica serves another version.")
            await send_error(send, error, scope["path"], link.turned_away(link.REFUSED))
            return
        if origin is not None:
            created.set(origin.created)
            id_seed.set(origin.seed)
        sent = given.pieces if given is not None else 0
        keeper = origin.replica if origin is not None and sent else self.address.replica_id
        current_replica.set(keeper_name(keeper, tenant.decode()))
        tier.set(work)
        tags, tag = self._tags[work], None
        if share:
            price, _, name = share.decode().partition(" ")
            tag = tags.tag(name, float(price))
        start_tag.set(tags.now if tag is None else tag.number)
        sender, batch = self._multiplexers.get(gateway) if number else None, self._source.batch
        if sender is not None:
            take = partial(sender.hand_over, number)
        told = batch.first_token if batch is not None and work != tiers.FLEX else None

        def first_token(ttft_s: float) -> None:
            if tag is not None:
                tag.began()
            if told is not None:
                told(ttft_s)

        response = EngineResponse(
            *(send, sender, number, self._source.weights, scope["path"], work, first_token),
            origin,
            sent,
            take,
        )
        response.accompany()
        task = asyncio.current_task()
        assert task is not None
        self.open_requests[task] = response
        if work != tiers.FLEX:
            self._prompts[response] = self._tokens(scope)
        self._open_by_gateway[gateway] += 1
        self.links.request_began()
        try:
            if given is not None:
                response.continues(given.origin.adapter, self._source.weights())
                body = await asgi.read_body(receive)
                at = len(body) - given.size
                before = continuation.decode(given.groups, body[at:])
                response.handed = sum(len(one.token_ids) for group in before for one in group)
                tokens_before.set(before)
                scope, receive = asgi.with_body(scope, receive, body[:at])
            await self._app(scope, receive, response.send)
            await response.flush()
        except asgi.ClientGone:
            return
        except asyncio.CancelledError:
            if self._refusal is None:
                raise
            task.uncancel()
        finally:
            del self.open_requests[task]
            self._prompts.pop(response, None)
            if tag is not None:
                tag.ended(response.has_begun)
            self._open_by_gateway[gateway] -= 1
            if not self._open_by_gateway[gateway]:
                del self._open_by_gateway[gateway]  # else gateways that have ended would stay
            response.close()
        if self._refusal is not None and not response.started:
            await response.turn_away(self._refusal)
        # uvicorn cuts a response that has started and not ended as soon as this returns.

    def _origin(self, given: Continuation | None, kept: bool) -> Origin | None:
        """Of a request's stream: as the gateway says, or here; None where it cannot be continued.

        kept: whether the gateway, or the job, keeps what is recorded.
        """
        serves = self._source.serves()
        if given is not None:
            return given.origin if given.origin.serves == serves else None
        if not kept or not serves:
            return None
        return Origin(serves, self.address.replica_id, int(time.time()), secrets.token_hex(8))

    async def _multiplex(self, gateway: bytes, receive: Receive, send: Send) -> None:
        """The multiplexed connection to a gateway, until either side ends it."""
        sender = self._multiplexers[gateway] = StreamSender()
        try:
            await sender.serve(receive, send)
        finally:
            if self._multiplexers.get(gateway) is sender:
                del self._multiplexers[gateway]

    async def _serve_rows(self, gateway: bytes, receive: Receive, send: Send) -> None:
        """The connection with the rows of a batch job, until either side ends it."""

        async def run(
            scope: Scope, receive: Receive, send: Send, given: Continuation | None, take: HandOver | None
        ) -> None:
            await self._run(gateway, scope, receive, send, tiers.FLEX, given=given, take=take)

        receiver = RowReceiver(run)
        self._row_receivers.add(receiver)
        try:
            await receiver.serve(receive, send)
        finally:
            self._row_receivers.discard(receiver)

    def _tokens(self, scope: Scope) -> int:
        """Of the prompt, estimated from the body's size as gateways do."""
        size = next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
        longest = self._source.hello().max_model_len
        tokens = size // link.BYTES_PER_TOKEN
        return tokens if longest is None else min(tokens, longest)

    def _tokens_before_engine(self, in_engine: int) -> int:
        """Prompt tokens of the online requests that came last, for which the engine has not been called.

        in_engine: how many it has. Their templates, tokenizers, images and hooks run before.
        """
        youngest = islice(reversed(self._prompts.items()), max(0, len(self._prompts) - in_engine))
        return sum(tokens for response, tokens in youngest if not response.started)

    def _open_elsewhere(self, gateway: bytes) -> int:
        return len(self.open_requests) - self._open_by_gateway[gateway]


async def _list(send: Send, adapters: Store | None) -> None:
    try:
        names = list(await adapters.listed()) if adapters else []
    except Error as error:
        log.warning("The adapters cannot be listed: %s", error, exc_info=error)
        await send_error(send, error, link.ADAPTERS_PATH)
    else:
        await send_json(send, names)


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())
