"""The fleet of one application as its file says it: control keeps its versions and applies new ones.

Versions are in control's own database, so that the next control goes on with an apply that this one began.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from penstock import progress
from penstock.config import LLMConfig, LLMServingArgs
from penstock.config.derive.prefill import halves
from penstock.config.derive.serve_options import deployment_name
from penstock.config.fleet.changes import ADAPTERS
from penstock.config.fleet.document import Document, StartSettings, document
from penstock.config.fleet.plan import FleetPlan, plan
from penstock.config.loading import keys_file
from penstock.config.messages.redact import masked
from penstock.config.schema.settings import Settings, service_name
from penstock.errors import (
    ConfigError,
    Conflict,
    Error,
    NotFound,
    PreconditionFailed,
    reason,
    sentence,
)
from penstock.preflight.start import faults_of_storage, missing_folders
from penstock.serve.control import application, stored_fleet
from penstock.serve.control.state import GONE_S
from penstock.serve.control.stored_fleet import APPLIED, APPLYING, SUPERSEDED, FleetVersion, StoredVersion

log = logging.getLogger(__name__)

_CAN_SURGE = "max_surge_percent" in inspect.signature(serve.deployment).parameters  # since Ray 2.60
_GONE = ("DELETING", "NOT_STARTED")
_SERVE_RESTARTS = (RayError, RayServeException)  # its controller does
_KEEP = 50
_LOOK_S = 0.5
_LOOK_AGAIN_S = 5.0  # whether gateways and replicas have taken over what they could not
_SILENCE_S = 60.0  # of storage, until the history says so
_COLUMNS = "version, at, who, what, outcome"
_TABLES = """
CREATE TABLE IF NOT EXISTS fleet (version INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, who TEXT, what TEXT,
    outcome TEXT, document BLOB, surges BLOB);
CREATE TABLE IF NOT EXISTS newest (version INTEGER, deployments BLOB);
CREATE TABLE IF NOT EXISTS start (settings BLOB);
CREATE TABLE IF NOT EXISTS seen (version INTEGER);
CREATE TABLE IF NOT EXISTS saved (document BLOB);
CREATE TABLE IF NOT EXISTS run (file TEXT);
"""
Deployments = Mapping[str, str | None]
"""Versions of deployments by name, as `builders.versions`: of the user's own code as it was then."""

_UNSTORED = "not stored at first"
_NEXT_START = "The next start takes the files again, as they are then."
_GATEWAY = "a gateway stays as it was, and tries again: "
_TRIED_AGAIN = (f"failed: {_GATEWAY}", "failed: a replica of ")  # as `Followers.adapters` goes on
_UNKNOWN = (
    "The fleet of this service is not known: it still starts, or a program has deployed it. Services that "
    "`penstock serve` or the manifest of `penstock kuberay` started can be changed by a file."
)


class FleetVersions:
    """Of one application."""

    def __init__(
        self,
        database: sqlite3.Connection,
        app: str,
        gateway_faults: Callable[[], Sequence[str]] = list[str],
        port: int | None = None,
        adapters: Callable[[], tuple[Sequence[str], Sequence[str]]] = lambda: ((), ()),
        retry_adapters: Callable[[], None] = lambda: None,
    ) -> None:
        """database: control's own, which nobody else may read. app: the application's name. gateway_faults:
        why gateways that run cannot take over the newest update. port: the gateway's own. adapters,
        retry_adapters: as `Followers` has them.
        """
        self._database, self._app = database, app
        self._gateway_faults, self._adapters = gateway_faults, adapters
        self._retry_adapters = retry_adapters
        self._service = service_name(app, port)
        self._database.executescript(_TABLES)
        self._applying: asyncio.Task[None] | None = None
        self._storing: asyncio.Task[None] | None = None
        self._to_store = ""  # URL of the storage that lacks something
        self._turn, self._saving, self._deploying = asyncio.Lock(), asyncio.Lock(), threading.Lock()

    def close(self) -> None:
        """Leaves an apply, and what is not stored yet, to the next control."""
        for task in (self._applying, self._storing):
            if task is not None:
                task.cancel()

    # -- versions

    def record(
        self, start: Mapping[str, Any], fleet: Document, who: str, deployments: Deployments | None = None
    ) -> None:
        """What has been deployed by other means. start: a `StartSettings`, as plain values."""
        settings = (msgspec.json.encode(start),)
        self._database.execute("REPLACE INTO start (rowid, settings) VALUES (1, ?)", settings)
        name = stored_fleet.file_name(self._service, time.time())
        self._database.execute("REPLACE INTO run (rowid, file) VALUES (1, ?)", (name,))
        self._see(self._add(who, "started", APPLIED, fleet, {}, deployments or {}))
        self._remember(fleet)

    def history(self) -> list[FleetVersion]:
        """The last 50, the newest first."""
        rows = self._database.execute(f"SELECT {_COLUMNS} FROM fleet ORDER BY version DESC LIMIT {_KEEP}")
        return [FleetVersion(*row) for row in rows]

    def _add(
        self,
        who: str,
        what: str,
        outcome: str,
        fleet: Document,
        surges: Mapping[str, int],
        deployments: Deployments,
    ) -> int:
        """Takes the place of one that is being applied. surges: `max_surge_percent` by model, while it is
        applied. All of it or nothing: control may be killed, or its disk be full.
        """
        with self._database:
            self._database.execute("BEGIN")
            added = self._database.execute(
                "INSERT INTO fleet (at, who, what, outcome, document, surges) VALUES (?, ?, ?, ?, ?, ?)",
                (time.time(), who, what, outcome, msgspec.json.encode(fleet), msgspec.json.encode(surges)),
            )
            version = added.lastrowid or 0
            self._database.execute("DELETE FROM newest")
            self._database.execute(
                "INSERT INTO newest VALUES (?, ?)", (version, msgspec.json.encode(deployments))
            )
            self._database.execute("DELETE FROM fleet WHERE version <= ?", (version - _KEEP,))
            superseded = f"{SUPERSEDED} by version {version}, by {who}"
            ended = self._set_outcome("version < ?", version, superseded)
        self._say(ended, superseded)
        return version

    def _end(self, version: int, outcome: str, before: str = APPLYING) -> None:
        """Of a version whose outcome was `before`. The command that serves says so."""
        self._say(self._set_outcome("version = ?", version, outcome, before), outcome)

    def _set_outcome(self, which: str, version: int, outcome: str, before: str = APPLYING) -> list[Any]:
        """Number, who and what of each version that gets it."""
        return self._database.execute(
            f"UPDATE fleet SET outcome = ? WHERE {which} AND outcome = ? RETURNING version, who, what",
            (outcome, version, before),
        ).fetchall()

    def _say(self, ended: Sequence[Any], outcome: str) -> None:
        for version, who, what in ended:
            text = f"Version {version} of the fleet, by {who} ({what}): {sentence(outcome)}"
            progress.note(f"{text} {_NEXT_START}")
        self._store()

    def remark(self, text: str) -> None:
        """Something that happened to the newest version, for the history."""
        self._remark(text)
        self._store()

    def _remark(self, text: str) -> None:
        newest = "SELECT max(version) FROM fleet"
        self._database.execute(
            f"UPDATE fleet SET what = what || '; ' || ? WHERE version = ({newest})", (text,)
        )
        progress.note(f"{text[0].upper()}{text[1:]}")

    def _newest(self) -> FleetVersion:
        """Raises: Conflict for a service whose fleet is not known."""
        if not (known := self.history()):
            raise Conflict(_UNKNOWN)
        return known[0]

    def _document(self, version: int, column: str = "document") -> Document:
        """Raises: NotFound."""
        row = None
        with suppress(OverflowError):  # SQLite has no number as large
            row = self._database.execute(
                f"SELECT {column} FROM fleet WHERE version = ?", (version,)
            ).fetchone()
        if row is None:
            raise NotFound(f"There is no version {version} of the fleet; `penstock history` shows them.")
        return msgspec.json.decode(row[0])

    def _start(self) -> StartSettings:
        (row,) = self._database.execute("SELECT settings FROM start").fetchall()
        return msgspec.json.decode(row[0], type=StartSettings)

    def _served(self, fleet: Document) -> LLMServingArgs:
        """Raises: ConfigError."""
        start = self._start()
        os.environ.update({**start.environment, **start.variables})  # as where the first version was built
        return start.applied(fleet)

    # -- where they outlive the service

    def _store(self) -> None:
        """Has the storage that the newest fleet names get all versions, in the background."""
        if not (known := self.history()):
            return
        jobs = self._document(known[0].version).get("jobs")
        self._to_store = (isinstance(jobs, dict) and jobs.get("storage")) or ""
        if self._to_store and (self._storing is None or self._storing.done()):
            self._storing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        """Until it has what is there now, or cannot be written: then with the next change."""
        while url := self._to_store:
            self._to_store = ""
            silent = f"the storage does not answer for {_SILENCE_S:g} s"
            late = asyncio.get_running_loop().call_later(_SILENCE_S, self._say_unstored, silent)
            try:
                await asyncio.to_thread(self._write_all, url)
            except Exception as error:  # of clients for storage, of many kinds
                unknown = not isinstance(error, Error)
                log.warning("The versions of the fleet are not stored: %s", error, exc_info=unknown)
                if not self._to_store:
                    self._say_unstored(reason(str(error)))
            finally:
                late.cancel()

    def _say_unstored(self, why: str) -> None:
        if _UNSTORED not in self._newest().what:
            self._remark(f"{_UNSTORED}: {why}")

    def _write_all(self, url: str) -> None:
        (name,) = self._database.execute("SELECT file FROM run").fetchone()
        query = f"SELECT {_COLUMNS}, document FROM fleet ORDER BY version DESC LIMIT {_KEEP}"
        rows = self._database.execute(query).fetchall()
        versions = [
            StoredVersion(*row[:-1], fleet=masked(msgspec.json.decode(row[-1])))  # in the order of its fields
            for row in rows
        ]
        stored_fleet.write(url, name, versions)

    # -- what clients ask

    async def show(self) -> dict[str, Any]:
        """The newest version, without secrets. held_up: what Serve says of an apply that goes on."""
        newest = self._newest()
        held_up: list[str] = []
        if newest.outcome == APPLYING:
            try:
                held_up = self._reasons((await asyncio.to_thread(application.state, self._app))[1])
            except _SERVE_RESTARTS:
                held_up = ["Ray Serve does not say how it gets on; it is asked again."]
            held_up += [f"Replicas of '{model}' load adapters." for model in self._adapters()[0]]
        fleet = masked(self._document(newest.version))
        return {**msgspec.to_builtins(newest), "held_up": held_up, "fleet": fleet}

    async def plan(self, fleet: Document) -> dict[str, Any]:
        """What an apply would do, and to which version. Raises: ConfigError, Conflict."""
        newest = self._newest()
        found, _ = await self._planned(newest, _kept(fleet))
        return {"version": newest.version, **found.plain()}

    async def apply(
        self,
        fleet: Document,
        who: str,
        if_match: str | None = None,
        take_over: bool = False,
        what: str = "",
        always: bool = True,
    ) -> dict[str, Any]:
        """Begins to apply a fleet. if_match: the version that must be the newest one. always: also one that
        changes nothing; otherwise that makes no version.

        Raises: ConfigError for a fleet that cannot be built; nothing has changed then. Conflict while another
        apply goes on. PreconditionFailed.
        """
        fleet = _kept(fleet)
        async with self._turn:
            newest = self._newest()
            if if_match is not None and if_match.strip('" ') not in ("*", str(newest.version)):
                raise PreconditionFailed(
                    f"The fleet is at version {newest.version} now, by {newest.who}, and not at "
                    f"{if_match} any more: run it again."
                )
            if newest.outcome == APPLYING and not take_over:
                raise Conflict(
                    f"{newest.who} applies version {newest.version} now ({newest.what}): wait until it is "
                    "there, or take over with --take-over."
                )
            found, deployments = await self._planned(newest, fleet)
            if found.faults:
                raise ConfigError(" ".join(found.faults))
            if found.is_empty and not always:
                return {**msgspec.to_builtins(newest), "plan": found.plain()}
            # Of a version that is not there, old replicas may run which the same surge must not stop.
            earlier = {} if newest.outcome == APPLIED else self._document(newest.version, "surges")
            surges = {one.model: one.surge_percent for one in found.models if one.surge}
            what = what or found.summary
            version = self._add(who, what, APPLYING, fleet, {**earlier, **surges}, deployments)
            if self._applying is not None:
                self._applying.cancel()
            self._applying = asyncio.create_task(self._apply(version))
        return {**msgspec.to_builtins(self._newest()), "plan": found.plain()}

    async def rollback(
        self, version: int | None, who: str, if_match: str | None = None, take_over: bool = False
    ) -> dict[str, Any]:
        """Applies an earlier version as a new one, unless that changes nothing. version: None for the last
        one that was applied before.

        Raises: as `apply`; NotFound.
        """
        newest = self._newest()
        if version is None:
            good = [one.version for one in self.history()[1:] if one.outcome == APPLIED]
            if not good:
                raise Conflict("There is no earlier version that was applied.")
            version = good[0]
        match, what = if_match or str(newest.version), f"rollback to version {version}"
        return await self.apply(self._document(version), who, match, take_over, what, always=False)

    async def save(self, fleet: Document, who: str, changed_only: bool = False) -> dict[str, Any] | str:
        """Applies what a file says when it is saved, in place of what is being applied now; see `apply`.

        Returns a sentence, or "", where nothing changes. So it is where a version that was applied since the
        last save says the same: that command wrote the file, and what came later stays. changed_only: nothing
        changes either where the last save said the same. Raises: as `apply`.
        """
        fleet = _kept(fleet)
        async with self._saving:  # a caller that was not answered in time asks again
            if changed_only and self._saved() == fleet:
                return ""
            newest = self._newest()
            begun = await self._save(fleet, who, newest)
            # Not before: a caller whom no control has answered asks again.
            self._see(newest.version if isinstance(begun, str) else begun["version"])
            self._remember(fleet)
        return begun

    async def _save(self, fleet: Document, who: str, newest: FleetVersion) -> dict[str, Any] | str:
        (since,) = self._database.execute("SELECT max(version) FROM seen").fetchone()
        if (await self.plan(fleet))["is_empty"]:
            return ""
        if known := await asyncio.to_thread(self._applied_since, since or 0, fleet):
            return (
                f"Nothing changes: the file is that of version {known.version}, by {known.who}, and version "
                f"{newest.version}, by {newest.who}, came after it. `penstock rollback {known.version}` "
                "applies it all the same."
            )
        return await self.apply(fleet, who, take_over=True)

    def _saved(self) -> Document | None:
        """What the last save said."""
        row = self._database.execute("SELECT document FROM saved").fetchone()
        return None if row is None else _kept(msgspec.json.decode(row[0]))

    def _remember(self, fleet: Document) -> None:
        row = (msgspec.json.encode(fleet),)
        self._database.execute("REPLACE INTO saved (rowid, document) VALUES (1, ?)", row)

    def _see(self, version: int) -> None:
        """Notes that it was the newest one at a save."""
        self._database.execute("REPLACE INTO seen (rowid, version) VALUES (1, ?)", (version,))

    def _applied_since(self, since: int, fleet: Document) -> FleetVersion | None:
        """The newest version after `since` that was applied and is the same fleet."""
        wanted = document(self._served(fleet))
        later = [one for one in self.history() if one.version > since and one.outcome == APPLIED]
        return next(
            (one for one in later if document(self._served(self._document(one.version))) == wanted), None
        )

    # -- an apply

    def resume(self) -> None:
        """Goes on with what an earlier control began. It ends when followers have had time to report here."""
        if (known := self.history()) and known[0].outcome.startswith((APPLYING, *_TRIED_AGAIN)):
            log.info("Applying version %d of the fleet, which an earlier control began.", known[0].version)
            self._applying = asyncio.create_task(self._apply(known[0].version, GONE_S))
        self._store()

    async def _planned(self, newest: FleetVersion, fleet: Document) -> tuple[FleetPlan, Deployments]:
        def planned() -> tuple[FleetPlan, Deployments]:
            before, after = self._served(self._document(newest.version)), self._served(fleet)
            is_guest = bool(self._start().node)
            if after.gateway.keys_file is not None and not is_guest:  # else it is on another node
                keys_file.load(after.gateway.keys_file)
            query = "SELECT deployments FROM newest WHERE version = ?"
            row = self._database.execute(query, (newest.version,)).fetchone()
            old: Deployments = msgspec.json.decode(row[0]) if row else {}
            new: Deployments = _builders().versions(after)
            restarts = [name for name in new if name in old and (new[name] is None or new[name] != old[name])]
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            free = ray.available_resources() if _CAN_SURGE else None
            can_grow = is_guest or Settings.read().cluster == "growing"
            found = plan(before, after, restarts, nodes, free, can_grow=can_grow)
            faults = [
                *found.faults,
                *faults_of_storage(after),
                *(() if can_grow else _not_here(found, after)),
            ]
            return replace(found, faults=faults), new

        found, deployments = await asyncio.to_thread(planned)
        if newest.outcome != APPLIED:
            note = f"Version {newest.version}, with which this is compared, is not there: {newest.outcome}."
            found = replace(found, is_complete=False, notes=[*found.notes, note])
        return found, deployments

    async def _apply(self, version: int, wait_s: float = 0.0) -> None:
        """To its end, or until it is cancelled. Serve keeps replicas whose version is the same, so that it
        can be done again. Where gateways or replicas stay as they were and try again, it ends when they
        could.

        wait_s: for gateways and replicas to report, before a control that is new knows what they say of it.
        """
        said = self._newest().outcome
        try:
            if said == APPLYING:
                await asyncio.to_thread(self._deploy, version)
                self._retry_adapters()
            await asyncio.sleep(wait_s)
            while True:
                await asyncio.sleep(_LOOK_S if said == APPLYING else _LOOK_AGAIN_S)
                try:
                    status, messages = await asyncio.to_thread(application.state, self._app)
                except _SERVE_RESTARTS as error:
                    log.info("Serve does not say how version %d gets on: %s", version, error)
                    continue
                if status == "RUNNING":
                    late, kept = self._adapters()
                    if why := " ".join(self._gateway_faults()):
                        kept = [f"{_GATEWAY}{why}", *kept]
                    if kept and said == APPLYING:
                        said = f"failed: {' '.join(kept)}"
                        await self._ended(version, said)
                    elif not (kept or late):
                        return await self._ended(version, APPLIED, said)
                if status == "DEPLOY_FAILED":
                    return await self._ended(version, f"failed: {' '.join(self._reasons(messages))}", said)
        except Exception as error:  # Serve's and Ray's, of many kinds
            log.exception("Version %d of the fleet cannot be applied", version)
            await self._ended(version, f"failed: {reason(str(error))}", said)

    async def _ended(self, version: int, outcome: str, before: str = APPLYING) -> None:
        """`_end`, once it can be written: an engine that does not start may have filled the disk."""
        while True:
            try:
                return self._end(version, outcome, before)
            except sqlite3.Error as error:
                log.error("That version %d is %r cannot be written yet: %s", version, outcome, error)
                await asyncio.sleep(_LOOK_AGAIN_S)

    def _reasons(self, messages: Mapping[str, str]) -> list[str]:
        """Each with its model. messages: by deployment, "" for none."""
        configs = self._document(self._newest().version)["llm_configs"]
        models = [one["model_loading_config"]["model_id"] for one in configs]
        names = {"": "", **{deployment_name(model): f"'{model}': " for model in models}}
        return [names.get(name, f"{name}: ") + sentence(reason(text)) for name, text in messages.items()]

    def _deploy(self, version: int) -> None:
        with self._deploying:  # the thread of an apply that was taken over goes on
            if self._newest().version != version:
                return
            args, surges = self._served(self._document(version)), self._document(version, "surges")
            models = [_surging(config, surges.get(config.model_id)) for config in args.llm_configs]
            built = _builders().build_openai_app(args.model_copy(update={"llm_configs": models}))
            if application.state(self._app)[0] not in _GONE:
                application.deploy(built, self._app, args.gateway.log_format)


def _not_here(found: FleetPlan, after: LLMServingArgs) -> list[str]:
    """A sentence for each folder that a model reads now and that this machine, the only one, lacks."""
    begun = {
        one.model
        for one in found.models
        if one.action in ("added", "rolled")
        or one.replicas[1] > one.replicas[0]
        or any(change.path in ADAPTERS or change.path.startswith("version.shadow") for change in one.changes)
    }
    parts = [half for config in after.llm_configs if config.model_id in begun for half in halves(config)]
    return list(dict.fromkeys(text for config in parts for text in missing_folders(config)))


def _kept(fleet: Document) -> Document:
    """In the one form that is kept, whichever of a file's it has: without paths of files, keys as hashes.

    Raises: ConfigError.
    """
    return document(LLMServingArgs.parse(fleet))


def _surging(config: LLMConfig, percent: int | None) -> LLMConfig:
    options = {} if percent is None else {"max_surge_percent": percent}
    return config.model_copy(update={"deployment_config": {**options, **config.deployment_config}})


def _builders() -> Any:
    """They import this room: control asks for them when it applies."""
    return importlib.import_module("penstock.serve.builders")
