"""A file of keys: read by gateways, changed by `penstock keys`. One change at a time, each of them whole."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from penstock.config.loading.yaml_source import Source, read, read_at
from penstock.config.messages.location import Location
from penstock.config.schema.tenants import KeysConfig
from penstock.errors import ConfigError

_MODE = 0o600


def load(path: str | Path) -> KeysConfig:
    """Reads a file of keys. JSON is read some fifty times as fast as YAML. Raises: ConfigError."""
    return KeysConfig.parse(*content(Path(path)))


@contextmanager
def changing(path: Path) -> Generator[dict[str, Any]]:
    """What the file says, to be changed in place; written when the block ends without an error, and has
    changed it.

    A missing file is made, for its owner only. Comments are lost. Raises: ConfigError, also when what is to
    be written is no file of keys.
    """
    if not path.name:
        raise ConfigError(f"'{path}' is a folder; name a file of keys in it.")
    try:
        with suppress(FileExistsError):
            path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, _MODE)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}.") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        values, location = content(path) if path.exists() else ({}, Location())
        KeysConfig.parse(values, location)
        before = deepcopy(values)
        yield values
        if values != before:
            KeysConfig.parse(values, Location(str(path)))
            _write(path, values)
    finally:
        os.close(lock)


def content(path: Path) -> Source:
    """What a file of JSON or YAML says, or a pipe. Raises: ConfigError."""
    if path.suffix != ".json":
        values, location = read_at(path) if _is_pipe(path) else read(path)
        return values or {}, location
    try:
        return json.loads(path.read_bytes()), Location(str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid JSON: {error}.") from error


def _is_pipe(path: Path) -> bool:
    try:
        return path.is_fifo()
    except OSError:  # as of a name that is too long; `read` says so
        return False


def _write(path: Path, values: dict[str, Any]) -> None:
    if path.suffix == ".json":
        text = json.dumps(values, indent=1, default=str)
    else:
        text = yaml.safe_dump(values, sort_keys=False, width=100)
    target = path.resolve()  # a link stays one
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    before = target.stat() if target.exists() else None
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE), "w") as file:
            if before is not None:  # gateways of another user or group go on reading it
                os.fchmod(file.fileno(), before.st_mode & 0o777)
                with suppress(PermissionError):
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {error.strerror}.") from error
