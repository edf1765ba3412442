"""Keys as clients send them, and what each may do. A key is random and ends with a checksum; what is known of
it is its hash, by which it is found.
"""

from __future__ import annotations

import math
import secrets
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256

from penstock.config.schema.tenants import KeyConfig, KeysConfig, LimitsConfig, TenantConfig
from penstock.serve.tenancy.limits import Allowance

PREFIX = "pk_"
DEFAULT_TENANT = "default"
"""Has the single API key, and what was stored before there were tenants."""

_ID = slice(7, 15)  # of a hash, as `penstock keys list` shows it
_MOST_LINES = 100
_MOST_TOKENS = 10_000
_NOTHING = TenantConfig()
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def new_key() -> str:
    """A new key, of 256 random bits, with a checksum for scanners of leaked keys."""
    secret = _digits(secrets.randbits(256), 43)
    return f"{PREFIX}{secret}{_digits(zlib.crc32(secret.encode()), 6)}"


def _digits(number: int, count: int) -> str:
    text = ""
    for _ in range(count):
        number, digit = divmod(number, len(_DIGITS))
        text = _DIGITS[digit] + text
    return text


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """What one key may do. models: None for all. expires: seconds since 1970.

    tenants: the tenant's allowance. limited: of this and the key's own, those with limits. most_tokens: of
    an answer.
    """

    tenant: str
    name: str
    models: frozenset[str] | None
    scopes: frozenset[str]
    expires: float
    tenants: Allowance
    limited: tuple[Allowance, ...]
    most_tokens: int | None


def changes(before: KeysConfig, after: KeysConfig) -> list[str]:
    """What is different, a line for each key and tenant, without anything secret."""
    old, new = _facts(before), _facts(after)
    lines: list[str] = []
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != (now := new.get(name)):
            lines.append(
                f"{name} removed" if now is None else f"{name} {'changed' if name in old else 'added'}: {now}"
            )
    more = len(lines) - _MOST_LINES
    return lines if more <= 0 else [*lines[:_MOST_LINES], f"{more} more keys and tenants"]


def _facts(found: KeysConfig) -> dict[str, str]:
    """By name, and a key's id, all that is not usual."""
    facts = {
        f"key {one.tenant}/{one.name} ({one.hash[_ID]})": one.model_dump_json(
            exclude_defaults=True, exclude={"tenant", "name", "hash"}
        )
        for one in found.keys
    }
    tenants = found.tenants.items()
    return facts | {f"tenant {name}": one.model_dump_json(exclude_defaults=True) for name, one in tenants}


def _digest(key: KeyConfig) -> bytes:
    return bytes.fromhex(key.hash.removeprefix("sha256:"))


class KeyTable:
    """All keys of a gateway, by the hashes of keys."""

    def __init__(self) -> None:
        self._grants: dict[bytes, Grant] = {}
        self._tokens: dict[bytes, Grant] = {}  # that were checked, the oldest first
        self._tenants: Mapping[str, TenantConfig] = {}
        self.allowances: dict[str, Allowance] = {}
        """By `tenant` and `tenant/key`. They keep their counts when keys are read again."""
        self.is_partial = False
        """Whether a file of keys could not be read yet."""

    def __len__(self) -> int:
        return len(self._grants)

    def replace(self, keys: Iterable[KeyConfig], tenants: Mapping[str, TenantConfig]) -> None:
        """From now on these keys are known, and no others."""
        self._grants, self._tokens, self._tenants = {}, {}, tenants
        before, self.allowances = self.allowances, {}
        for name, config in tenants.items():  # tokens may name one that has no key
            self._allowance(name, config.limits, before)
        self._grants = {_digest(key): self._grant(key, before) for key in keys}

    def add_token(self, token: KeyConfig) -> Grant:
        """Knows a token that was checked, until it expires."""
        while len(self._tokens) >= _MOST_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        grant = self._tokens[_digest(token)] = self._grant(token, self.allowances)
        return grant

    def forget_tokens(self) -> None:
        """They are to be checked again."""
        self._tokens.clear()

    def _grant(self, key: KeyConfig, before: Mapping[str, Allowance]) -> Grant:
        config = self._tenants.get(key.tenant, _NOTHING)
        given = [(key.tenant, config.limits)]
        if key.limits != _NOTHING.limits:
            given.insert(0, (f"{key.tenant}/{key.name}", key.limits))
        allowances = [self._allowance(*one, before) for one in given]
        allowances[-1].weight = config.weight
        return Grant(
            key.tenant,
            key.name,
            None if key.models is None else frozenset(key.models),
            frozenset(key.scopes),
            math.inf if key.expires is None else key.expires,
            allowances[-1],
            tuple(one for one in allowances if one.is_limited),
            min((one.max_tokens for _, one in given if one.max_tokens is not None), default=None),
        )

    def _allowance(self, name: str, limits: LimitsConfig, before: Mapping[str, Allowance]) -> Allowance:
        allowance = self.allowances.get(name) or before.get(name) or Allowance(name)
        allowance.limit(limits)
        self.allowances[name] = allowance
        return allowance

    def find(self, key: bytes, now: float) -> Grant | None:
        """What a key may do; None for an unknown or expired one. now: seconds since 1970.

        The time that it takes says nothing of a key: only hashes are compared.
        """
        digest = sha256(key).digest()
        grant = self._grants.get(digest) or self._tokens.get(digest)
        return grant if grant is not None and now < grant.expires else None
