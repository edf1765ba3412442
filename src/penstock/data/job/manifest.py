"""`job.json`: a job's spec, its input files, and where its last driver stopped. One per output."""

from __future__ import annotations

import msgspec

from penstock.config.messages.redact import STARS, is_secret, masked
from penstock.data.job.report import JobReport
from penstock.data.job.spec import JobSpec
from penstock.data.storage.paths import StoragePath
from penstock.data.storage.source import InputFiles
from penstock.errors import ConfigError, SourceNotFound

NAME = "job.json"


class JobManifest(
    msgspec.Struct, frozen=True, kw_only=True, rename={"spec": "order", "stop_reason": "ended"}
):
    """stop_reason: why the last driver stopped; None while it runs, or after it was killed or its disk full.

    total: rows of the input, once they are counted.
    """

    spec: JobSpec
    source: InputFiles
    total: int | None = None
    stop_reason: str | None = None
    report: JobReport | None = None

    @property
    def finished(self) -> bool:
        return self.stop_reason == FINISHED


FINISHED = "finished"


def read(journal: StoragePath) -> JobManifest | None:
    """The manifest in a journal; None if there is none. Raises: ConfigError when it cannot be read."""
    at = journal / NAME
    try:
        data = at.read()
    except SourceNotFound:
        return None
    try:
        return msgspec.json.decode(data, type=JobManifest)
    except ValueError as error:
        raise ConfigError(f"'{at.url}' is not a job that this version can read: {error}.") from error


def write(journal: StoragePath, manifest: JobManifest) -> None:
    stored = msgspec.structs.replace(manifest, spec=redacted(manifest.spec))
    (journal / NAME).write(msgspec.json.format(msgspec.json.encode(stored)))


def redacted(spec: JobSpec) -> JobSpec:
    """The spec as it is stored: without API keys of engines, and with stars for secrets in URLs."""
    engines = msgspec.structs.replace(
        spec.engines, cli_args=_without_api_keys(spec.engines.cli_args), url=masked(spec.engines.url)
    )
    return msgspec.structs.replace(spec, inputs=tuple(map(masked, spec.inputs)), engines=engines)


def _without_api_keys(arguments: tuple[str, ...]) -> tuple[str, ...]:
    stored: list[str] = []
    after_key = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_key = argument.startswith("--") and is_secret(name)
        if not is_key and not (after_key and not argument.startswith("--")):
            stored.append(argument)
        after_key = is_key and not equals
    return tuple(stored)


def check_resumable(spec: JobSpec) -> None:
    """Raises: ConfigError when the stored spec is not enough to resume the job."""
    if any(STARS in url for url in (*spec.inputs, spec.engines.url or "")):
        raise ConfigError(
            f"The journal of '{spec.output}' holds no passwords and no signatures of URLs: resume by "
            "the command, or the call, that began it."
        )


_MAY_DIFFER = frozenset(
    {"engines", "is_openai_batch", "limit", "max_attempts", "deadline_s", "group_prefixes"}
)
"""Options that change neither the rows nor their requests, and those with separate rules."""


def differing_fields(stored: JobSpec, other: JobSpec) -> list[str]:
    """Options in which `other` differs from the stored spec, so that it is another job."""
    other = redacted(other)
    names = (field for field in JobSpec.__struct_fields__ if field not in _MAY_DIFFER)
    return [name for name in names if getattr(stored, name) != getattr(other, name)]
