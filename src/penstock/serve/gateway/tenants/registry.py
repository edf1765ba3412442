"""The tenants of one gateway: their keys, what they may still do, and what they have used.

Keys come from the config and from a file, which is read again when it changes. Usage goes to a store, once a
second; the store's answer says what other gateways have counted. Without an answer the gateway goes on with
what it knows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pwd
import time
from collections import Counter
from collections.abc import Sequence

from penstock import progress
from penstock.config import GatewayConfig
from penstock.config.loading.keys_file import load
from penstock.config.schema.tenants import USUAL_SCOPES, KeyConfig, KeysConfig, Scope, hashed
from penstock.errors import ConfigError, Overloaded
from penstock.metrics import GatewayMetrics
from penstock.serve.gateway.tenants.meter import Asked, RequestMeter, TokenCounts
from penstock.serve.gateway.tenants.tokens import IssuedTokens
from penstock.serve.tenancy.fairness import price as weighed
from penstock.serve.tenancy.keys import DEFAULT_TENANT, Grant, KeyTable, changes
from penstock.serve.tenancy.limits import DAY_S, Periods, reserve, settle
from penstock.serve.tenancy.prices import PriceList
from penstock.serve.tenancy.reporting import Served, Settle, UsageReporter
from penstock.serve.tenancy.usage import UsageRow
from penstock.tiers import DEFAULT, FLEX

log = logging.getLogger(__name__)

_LOOK_S = 0.5  # at the file of keys
_MOST_SHOWN = 200
_REST = "other"
"""Tenants in metrics: so many, and all others together."""

State = tuple[int, int, int, int] | None
FoundKeys = tuple[KeysConfig, State]


class Tenants:
    """Used on the gateway's event loop, between `start` and `close`."""

    def __init__(
        self,
        config: GatewayConfig,
        settle: Settle | None,
        metrics: GatewayMetrics | None = None,
        served: Served | None = None,
    ) -> None:
        """settle: None to keep usage for the metrics only. metrics: of a gateway; another process that has
        tenants, that of batches, finds no tokens. served: called with what other gateways have served.
        """
        self._config = config
        self._metrics = metrics
        self._state: State = None
        self._known: KeysConfig | None = None
        self._today = Periods.at(time.time())
        self._begins = 0.0
        self._shown, self._named = dict[str, UsageRow](), set[str]()
        self._refused = Counter[str]()
        self._watching: asyncio.Task[None] | None = None
        self.tokens: IssuedTokens | None = None
        self.keys = KeyTable()
        self.usage = UsageReporter(
            settle, lambda: self.keys.allowances, is_gateway=metrics is not None, served=served
        )

    async def start(self, *, is_late: bool = False) -> None:
        """Begins without a file of keys that cannot be read, and takes it when it can: a gateway that
        restarts must open its port. is_late: the service has run without tenants, so the first that `follow`
        takes are changes for the audit.
        """
        try:
            self.follow(self._config, await read_keys(self._config))
        except ConfigError as error:
            self.follow(self._config, (KeysConfig(), None))
            self.keys.is_partial, self._known = True, None
            text = f"A gateway refuses keys of tenants with 503 until it can read them: {error}"
            log.error("%s", text)
            progress.note(text)
        await self.usage.start()
        if is_late:
            self._known = KeysConfig()

    def follow(self, config: GatewayConfig, found: FoundKeys) -> None:
        """Takes the keys and tenants of this config from now on; those that stay keep their counts."""
        if self._watching is not None:
            self._watching.cancel()
        self._config, (keys, self._state) = config, found
        self._prices = PriceList(config.prices)
        self.usage.counters.webhook = config.webhook or ""
        self._take(keys)
        oidc = config.oidc if self._metrics is not None else None
        if oidc != (self.tokens.config if self.tokens is not None else None):
            if self.tokens is not None:
                self.tokens.close()
            self.tokens = None if oidc is None else IssuedTokens(oidc, self.keys)
        file = config.keys_file
        self._watching = asyncio.create_task(self._watch(file)) if file is not None else None

    async def close(self) -> None:
        """Settles a last time."""
        if self._watching is not None:
            self._watching.cancel()
        if self.tokens is not None:
            self.tokens.close()
        await self.usage.close()

    # -- keys

    def _take(self, found: KeysConfig, who: str = "the fleet's file") -> None:
        """who: has changed them."""
        config, own = self._config, list[KeyConfig]()
        if config.api_key is not None:
            scopes: list[Scope] = [*USUAL_SCOPES, "metrics"]
            key_hash = hashed(config.api_key.get_secret_value())
            own = [KeyConfig(tenant=DEFAULT_TENANT, name=DEFAULT_TENANT, hash=key_hash, scopes=scopes)]
        keys, tenants = [*config.keys, *found.keys], {**config.tenants, **found.tenants}
        self.keys.replace([*own, *keys], tenants)
        self.usage.counters.knows = False
        self.keys.is_partial = False
        before, self._known = self._known, KeysConfig.model_construct(keys=keys, tenants=tenants)
        if before is not None:
            self.usage.counters.changes += [(who, what) for what in changes(before, self._known)]

    async def _watch(self, file: str) -> None:
        failed = self._state
        while True:
            await asyncio.sleep(_LOOK_S)
            state: State = None
            try:
                state = await asyncio.to_thread(_state, file)
                if state == self._state:
                    continue
                self._take(await asyncio.to_thread(load, file), f"{file} ({_owner(state)})")
            except Exception as error:  # of any kind, such as too many threads: later changes must be seen
                unknown = not isinstance(error, ConfigError)
                if state != failed:
                    log.error("The keys stay as they were: %s", error, exc_info=unknown)
                failed = state
                if unknown or isinstance(error.__cause__, OSError):
                    continue  # a file system may be away for a while, and the file as it is now
            else:
                log.info("%s has been read again: %d keys.", file, len(self.keys))
            self._state = state

    # -- requests

    def begin(self, grant: Grant, asked: Asked, model: str, adapter: str, tier: str) -> RequestMeter:
        """Reserves for a request. Raises: RateLimited, QuotaExhausted."""
        answer, second, seconds = asked.answer_tokens, int(time.monotonic()), time.time()
        mean = grant.tenants.answer_tokens
        most = int(mean) if answer is None else answer
        tokens, price = asked.prompt_tokens + most, self._prices.find(model, adapter)
        cost = 0 if price is None else price.cost(asked.prompt_tokens, 0, most, images=asked.images)
        try:
            reserve(grant.limited, tokens, second, self._day(seconds), seconds, cost, free=asked.free)
        except Overloaded:
            self._refused[grant.tenant] += 1
            self.usage.hurry()
            raise
        expected = mean if answer is None or answer > mean else answer
        return RequestMeter(grant, asked, expected, (tokens, cost), second, adapter, tier)

    def refused(self, grant: Grant, model: str) -> None:
        """A request got no further than this gateway's checks. model: "" where it names none of its key's."""
        row = self.usage.counters.row(grant.tenant, grant.name, model, "", DEFAULT, time.time())
        row.requests += 1
        row.errors += 1
        row.refused += 1

    def end(
        self, meter: RequestMeter, model: str, tokens: TokenCounts, *, failed: bool, reached: bool = True
    ) -> None:
        """The request has ended. reached: whether a replica had it. Later calls do nothing."""
        if not meter.is_open:
            return
        meter.is_open = False
        seconds, second, grant = time.time(), int(time.monotonic()), meter.grant
        price, today = self._prices.find(model, meter.adapter), self._day(seconds)
        prompt, cached, output, *_ = tokens
        cost = 0 if price is None else price.cost(*tokens)
        settle(grant.limited, meter.reserved, (prompt + output, cost), meter.begun, second, today)
        meter.settle(weighed(prompt, cached, output))
        row = self.usage.counters.row(grant.tenant, grant.name, model, meter.adapter, meter.tier, seconds)
        row.requests += 1
        row.add(*tokens, cost)
        if failed:
            row.errors += 1
            row.refused += not reached
        elif output:
            grant.tenants.learn(output)

    def add_rows(self, tenant: str, key: str, models: Sequence[str], row: UsageRow) -> bool:
        """Counts rows of a batch, which have reserved nothing. Returns whether a budget is used up."""
        seconds, second, used_up = time.time(), int(time.monotonic()), False
        tokens = row.prompt_tokens, row.cached_tokens, row.output_tokens
        row.cost = self._prices.dearest(models, *tokens)
        if row.requests:
            model = models[0] if len(models) == 1 else ""
            self.usage.counters.row(tenant, key, model, "", FLEX, seconds).merge(row)
        for name in (f"{tenant}/{key}", tenant):
            if (one := self.keys.allowances.get(name)) is not None and one.has_budget:
                spent = row.prompt_tokens + row.output_tokens
                used_up |= one.spend(spent, row.cost, second, self._day(seconds))
        return used_up

    def _day(self, seconds: float) -> Periods:
        if not self._begins <= seconds < self._today.day_ends:
            self._today = Periods.at(seconds)
            self._begins = self._today.day_ends - DAY_S
        return self._today

    # -- usage

    def count(self) -> None:
        """Brings the metrics up to date."""
        metrics = self._metrics
        assert metrics is not None
        for tenant, row in self.usage.counters.sums().items():
            name = self._name(tenant)
            before, self._shown[tenant] = self._shown.get(tenant, UsageRow()), row
            metrics.tenant_requests.labels(name).inc(row.requests - before.requests)
            for kind in ("prompt", "cached", "output"):
                count = getattr(row, f"{kind}_tokens") - getattr(before, f"{kind}_tokens")
                metrics.tenant_tokens.labels(name, kind).inc(count)
        refused, self._refused = self._refused, Counter()
        for tenant, count in refused.items():
            metrics.tenant_refusals.labels(self._name(tenant)).inc(count)

    def _name(self, tenant: str) -> str:
        """In the metrics."""
        if len(self._named) < _MOST_SHOWN:
            self._named.add(tenant)
        return tenant if tenant in self._named else _REST


async def read_keys(config: GatewayConfig) -> FoundKeys:
    """What the config's file says, if it has one. Raises: ConfigError for a file that cannot be read."""
    if config.keys_file is None:
        return KeysConfig(), None
    state = _state(config.keys_file)  # first: it may change while it is read
    return await asyncio.to_thread(load, config.keys_file), state


def _state(file: str) -> State:
    """What changes when the file does, or the link to it."""
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size, stat.st_uid


def _owner(state: State) -> str:
    """Whose the file is: after `penstock keys`, who has called that; root leaves it its owner."""
    if state is None:
        return "nobody"
    try:
        return pwd.getpwuid(state[-1]).pw_name
    except KeyError:
        return f"user {state[-1]}"
