"""LiteLLM's virtual keys and teams, as its proxy lists them, as entries of a file of keys.

LiteLLM stores the SHA-256 of a whole key, as such a file does, so clients go on with the keys that they have.
What has no counterpart here is noted: one sentence for each kind, with the keys that it concerns.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from glob import escape
from hashlib import sha256
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, ConfigDict

from penstock.config.loading.yaml_source import Source
from penstock.config.schema.strict import StrictModel, matching
from penstock.config.schema.tenants import MOST, KeysConfig, Moment, as_name
from penstock.serve.tenancy.keys import DEFAULT_TENANT

_LIMITS = {
    "rpm_limit": "requests_per_minute",
    "tpm_limit": "tokens_per_minute",
    "tpd_limit": "tokens_per_day",
    "max_parallel_requests": "open_requests",
    "max_budget": "cost_per_month",
    "soft_budget": "warn_cost_per_month",
}
_MONTHS = ("30d", "1mo", "monthly")  # LiteLLM, too, counts calendar months then
_ALL_MODELS = {"*", "all-proxy-models", "all-team-models"}
_MODEL_ROUTES = {"llm_api_routes", "llm_api_routes_without_mcp", "openai_routes"}
_NO_COUNTERPART = (
    *("model_rpm_limit", "model_tpm_limit", "model_max_budget", "budget_limits", "budget_fallbacks", "tags"),
    *("guardrails", "policies", "aliases", "access_group_ids", "object_permission", "auto_rotate"),
    *("org_id", "organization_id", "agent_id", "router_settings", "permissions", "config"),
    *("model_itpm_limit", "model_otpm_limit", "mcp_rpm_limit", "tag_rpm_limit", "end_user_budget_id"),
    *("enforced_params", "temp_budget_increase", "prompts", "logging", "allowed_cache_controls"),
    *("allowed_passthrough_routes", "allowed_vector_store_indexes", "default_team_member_models"),
    *("litellm_model_table", "team_member_budget_id"),
)
_ADMIN = "default_user_id"  # who has the master key
_MOST_NAMES = 20
_LATEST = 253_402_300_799  # the last second of the year 9999
_SAVE = "save the answers to `/key/list?return_full_object=true`, to `/team/list` and to `/user/list`."
_OwnerId = tuple[str, str]


class _Limited(StrictModel):
    """A key, a team, or the budget that several keys name. Extra fields are for `_NO_COUNTERPART`."""

    model_config = ConfigDict(extra="allow")

    rpm_limit: int | None = None
    tpm_limit: int | None = None
    tpd_limit: int | None = None
    max_parallel_requests: int | None = None
    max_budget: float | None = None
    soft_budget: float | None = None
    budget_duration: str | None = None
    spend: float | None = None
    models: list[str] | None = None
    blocked: bool | None = None
    metadata: dict[str, Any] | None = None
    litellm_budget_table: _Limited | None = None

    def given(self, field: str) -> Any:
        """A limit; that of the budget where there is none of its own."""
        own, budget = getattr(self, field), self.litellm_budget_table
        return own if own is not None or budget is None else getattr(budget, field)

    def limits(self) -> dict[str, float]:
        """By the names of `LimitsConfig`; 0 lets nothing run."""
        found = {ours: self.given(theirs) for theirs, ours in _LIMITS.items()}
        if not found["warn_cost_per_month"]:
            del found["warn_cost_per_month"]
        return {name: max(0, min(value, MOST)) for name, value in found.items() if value is not None}

    def allowed(self) -> list[str] | None:
        """Models and patterns of models; None for all."""
        if not self.models or _ALL_MODELS & {*self.models}:
            return None
        return [one for one in self.models if one != "no-default-models"]


class _Team(_Limited):
    team_id: str
    team_alias: str | None = None
    team_memberships: list[dict[str, Any]] | None = None

    @property
    def names(self) -> tuple[str | None, ...]:
        return self.team_alias, self.team_id


class _User(_Limited):
    user_id: str
    user_alias: str | None = None
    user_email: str | None = None

    @property
    def names(self) -> tuple[str | None, ...]:
        return self.user_alias, self.user_email, self.user_id

    def allowed(self) -> list[str] | None:
        """Of keys without a team: LiteLLM then takes nothing beside `no-default-models`."""
        return [] if "no-default-models" in (self.models or ()) else super().allowed()


class _Key(_Limited):
    token: Annotated[str, *matching(r"[0-9a-f]{64}", "the SHA-256 of a key; remove entries without one")]
    key_alias: str | None = None
    team_id: str | None = None
    user_id: str | None = None
    expires: Moment = None
    project_id: str | None = None
    allowed_routes: list[str] | None = None

    @property
    def hash(self) -> str:
        return f"sha256:{self.token}"

    @property
    def owner(self) -> _OwnerId:
        return ("team", self.team_id) if self.team_id else _of_user(self.user_id)


def _of_user(user_id: str | None) -> _OwnerId:
    return "user", "" if user_id in (None, _ADMIN) else user_id


def _whole(keys: Any) -> Any:
    if isinstance(keys, list) and any(isinstance(key, str) for key in cast("list[Any]", keys)):
        raise ValueError(f"does not say what the keys may do; {_SAVE}")
    return keys


class _Answer(StrictModel):
    model_config = ConfigDict(extra="ignore")

    keys: Annotated[list[_Key] | None, BeforeValidator(_whole)] = None
    teams: list[_Team] | None = None
    users: list[_User] | None = None
    total_count: int | None = None  # of keys
    total: int | None = None  # of users


class Export:
    """What files of a LiteLLM proxy's answers say together."""

    def __init__(self, answers: Iterable[Source]) -> None:
        """Raises: ConfigError."""
        keys: dict[str, _Key] = {}
        self.owners: dict[_OwnerId, _Team | _User] = {}
        total, users = 0, -1
        for found, location in answers:
            if isinstance(found, list):
                are_keys = any(isinstance(one, dict) and "token" in one for one in cast("list[Any]", found))
                found = {"keys" if are_keys else "teams": found}
            said = _Answer.parse(found, location)
            if said.keys is said.teams is said.users is None:
                raise location.fault(f"lists no keys, teams or users; {_SAVE}")
            keys |= {key.token: key for key in said.keys or ()}
            self.owners |= {("team", one.team_id): one for one in said.teams or ()}
            self.owners |= {_of_user(one.user_id): one for one in said.users or ()}
            total = max(total, said.total_count or 0)
            users = users if said.users is None else max(users, said.total or 0)
        self.keys = [*keys.values()]
        self.missing = total - len(keys)
        self.has_all_users = 0 <= users <= sum(kind == "user" for kind, _ in self.owners)


class Import:
    """Adds keys and tenants to what a file of keys says, in place. What is there stays as it is."""

    def __init__(self, export: Export, values: dict[str, Any]) -> None:
        had = KeysConfig.parse(values)
        before = {one.hash: one.tenant for one in had.keys}
        self.added: list[dict[str, Any]] = []
        self.known = 0
        self.left = Counter[str]()
        """Keys that are of no use at LiteLLM either, by the reason."""
        self._notes: dict[str, list[str]] = {}
        self._names = {(one.tenant, one.name) for one in had.keys}
        self._owners, self._has_all_users = export.owners, export.has_all_users
        claims: dict[str, set[_OwnerId]] = {}
        for owner, one in export.owners.items():
            for name in filter(None, one.names):
                claims.setdefault(as_name(name), set()).add(owner)
        known = {
            key.owner: before[key.hash]
            for key in export.keys
            if key.hash in before and key.owner in claims.get(before[key.hash], {key.owner})
        }
        self._tenants = {("user", ""): DEFAULT_TENANT} | known
        self._taken = {*self._tenants.values()}
        there = {*had.tenants, *(one.tenant for one in had.keys)}
        joined: set[str] = set()
        with_keys = {key.owner for key in export.keys}
        for owner, one in export.owners.items():
            name, limits = self._tenant(owner), one.limits()
            if owner in with_keys and not one.blocked and 0 not in limits.values():
                self._limit(name, limits, values)
                if owner not in known:
                    self._note_rest(one, f"tenant {name}")
        for key in export.keys:
            if key.hash in before:
                self.known += 1
                if self._useless(key):
                    said = "LiteLLM refuses these keys, which the file has; revoke them: {}."
                    self._note(said, key.token[:8])
            elif self._add(key) and key.owner not in known and key.owner != _of_user(None):
                joined |= {self._tenants[key.owner]} & there
        if joined:
            said = "The file had these tenants, and LiteLLM's teams or users of these names join them: {}."
            self._note(said, *sorted(joined))
        if self.added:
            values.setdefault("keys", []).extend(self.added)
        if export.missing > 0:
            self._note(f"Keys on pages of `/key/list` that no file has: {export.missing}; import these, too.")
        for model in dict.fromkeys(model for one in self.added for model in one.get("models", ())):
            does = "Serve models by these names, as ids or aliases"
            if "*" in model.removesuffix(":*"):  # that one means its adapters
                does = "Patterns match no model"
            elif ":" in model:
                does += "; else what follows the colon means an adapter"
            self._note(f"{does}: {{}}.", repr(model))

    def notes(self) -> list[str]:
        """Sentences about what is not as it was at LiteLLM."""
        said: list[str] = []
        for sentence, names in self._notes.items():
            more = len(names) - _MOST_NAMES
            text = ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
            said.append(sentence.replace("{}", text))
        return said

    def _note(self, sentence: str, *names: str) -> None:
        self._notes.setdefault(sentence, []).extend(names)

    def _tenant(self, owner: _OwnerId) -> str:
        """That of the owner's keys that were there, else one that no other owner of these files has."""
        if owner not in self._tenants:
            known = self._owners.get(owner)
            names = (*(known.names if known else ()), *reversed(owner))
            name = next(filter(None, (as_name(one or "") for one in names)))
            if name in self._taken:
                name = f"{name[:55]}-{sha256(repr(owner).encode()).hexdigest()[:8]}"
            self._tenants[owner] = name
            self._taken.add(name)
        return self._tenants[owner]

    def _limit(self, tenant: str, limits: dict[str, float], values: dict[str, Any]) -> None:
        if not limits:
            return
        there = values.setdefault("tenants", {}).setdefault(tenant, {})
        if there.setdefault("limits", limits) != limits:
            self._note("These tenants keep the limits that the file has: {}.", tenant)

    def _add(self, key: _Key) -> bool:
        """Whether it was added."""
        owner = self._owners.get(key.owner)
        if why := self._useless(key):
            self.left[why] += 1
            return False
        tenant, its_id = self._tenant(key.owner), key.token[:8]
        name = as_name(key.key_alias or "") or f"key-{its_id}"
        while (tenant, name) in self._names:
            name = f"{name[: 63 - len(its_id)]}-{its_id}"
            its_id = key.token[: len(its_id) + 8]
        models = _models(key, owner)
        if why := self._refusal(key, models):
            self.left["named on stderr"] += 1
            self._note(f"Left out: {why}: {{}}.", f"{tenant}/{name}")
            return False
        self._names.add((tenant, name))
        ends = key.expires and datetime.fromtimestamp(min(key.expires, _LATEST), UTC).isoformat()
        more = {"models": models, "expires": ends, "limits": key.limits()}
        entry = {"tenant": tenant, "name": name, "hash": key.hash}
        self.added.append(entry | {field: value for field, value in more.items() if value})
        self._note_rest(key, f"{tenant}/{name}")
        if key.team_id and key.user_id:
            user = self._owners.get(_of_user(key.user_id))
            members = (isinstance(owner, _Team) and owner.team_memberships) or ()
            own = [one.get("litellm_budget_table") for one in members if one.get("user_id") == key.user_id]
            if any(own) or (user and user.limits()):
                self._note("Not imported: limits of single members of teams: {}.", f"{tenant}/{name}")
        return True

    def _useless(self, key: _Key) -> str | None:
        """Why nobody can use a key at LiteLLM."""
        owner, user = self._owners.get(key.owner), self._owners.get(_of_user(key.user_id))
        both = [key] if owner is None else [key, owner]
        if any(one.blocked for one in both) or (user and (user.metadata or {}).get("scim_active") is False):
            return "blocked"
        if key.expires is not None and key.expires <= time.time():
            return "expired"
        return "with a limit of 0" if any(0 in one.limits().values() for one in both) else None

    def _refusal(self, key: _Key, models: list[str] | None) -> str | None:
        """Why a key could be used for nothing, or for more than before, if it were imported."""
        kind, its_id = key.owner
        if models == []:
            return "keys that may use no model"
        if its_id and key.owner not in self._owners:
            if kind == "team":
                return "keys of a team that no file lists; add what `/team/list` answers"
            if not self._has_all_users:
                return "keys of a user whom no file lists; add all pages of what `/user/list` answers"
        if key.project_id:
            return "keys of projects, whose models and limits no file has"
        if key.allowed_routes and not _MODEL_ROUTES & {*key.allowed_routes}:
            return "keys for some of LiteLLM's routes only; make these with `penstock keys create --scopes`"
        return None

    def _note_rest(self, one: _Limited, name: str) -> None:
        budget = one.litellm_budget_table
        places = [one.metadata or {}, one.model_extra or {}, (budget and budget.model_extra) or {}]
        for field in _NO_COUNTERPART:
            if any(_says(place.get(field)) for place in places):
                self._note(f"Not imported: LiteLLM's `{field}`, of {{}}.", name)
        if not one.limits().keys() & {"cost_per_month", "warn_cost_per_month"}:
            return
        self._note("Budgets count by `gateway.prices`; a model without a price costs nothing.")
        if (span := one.given("budget_duration")) not in _MONTHS:
            what = f"{name} ({as_name(span) if span else 'never began anew'})"
            self._note("These budgets count by calendar month now: {}.", what)
        if one.spend:
            self._note("Budgets begin anew, whatever was spent: {}.", name)


def _models(key: _Key, owner: _Limited | None) -> list[str] | None:
    """Models that a key may use, within its owner's; None for all."""
    own, most = key.allowed(), owner.allowed() if owner else None
    if own is None or most is None:
        return most if own is None else own
    patterns = [escape(one).replace("[*]", "*") for one in most]  # only * is special
    return [one for one in own if any(fnmatchcase(one, pattern) for pattern in patterns)]


def _says(value: Any) -> bool:
    """Whether a field of LiteLLM says anything; its objects have all of their fields."""
    if not isinstance(value, dict):
        return bool(value)
    fields = cast("dict[str, Any]", value).items()
    return any(one not in (None, [], {}) for name, one in fields if name != "object_permission_id")
