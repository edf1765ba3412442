"""Checks a plan before Ray starts: mistakes that would otherwise cost a minute."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence

from penstock.cli.models.engine_arguments import read_engine_words
from penstock.cli.models.faults import faults, missing_folders
from penstock.cli.models.options import OPTIONS, YAML, Arguments
from penstock.cli.models.plan import ServePlan
from penstock.config.derive.accelerators import missing_here
from penstock.config.derive.prefill import halves
from penstock.config.messages.problems import config_error
from penstock.errors import ConfigError
from penstock.serve.http.tls import Certificate

_ALIKE = 0.8
"""Of an engine's flag and one of our options: so the user is answered before Ray starts, not beside it."""


def with_all_faults(error: ConfigError, arguments: Arguments) -> ConfigError:
    """The error, and what `penstock check` finds in the same files."""
    files = [word for word in arguments.sources if word.endswith(YAML) and os.path.isfile(word)]
    _, found, _ = faults(files)
    return config_error(dict.fromkeys([*(error.problems or [str(error)]), *found]))


def checked(plan: ServePlan, arguments: Arguments) -> ServePlan:
    """The plan, with its engine's arguments read where that is quick or one looks like an option of ours.

    Raises: ConfigError for a certificate that cannot be used, and for what this machine lacks, where the
    cluster is this machine alone.
    """
    if (tls := plan.gateway.tls) is not None:
        Certificate(tls.cert, tls.key)  # the gateway runs on this machine, on whatever cluster
    if arguments.address is None:
        configs = [half for config in plan.configs for half in halves(config)]
        problems = [text for config in configs if (text := missing_here(config)) is not None]
        problems += [text for config in plan.configs for text in missing_folders(config)]
        if problems:
            raise config_error(dict.fromkeys(problems))
    if not plan.engine_words:
        return plan
    (config,) = plan.configs
    is_slow = config.engine_name == "vllm"  # it takes seconds, so it is asked while Ray starts
    return plan if is_slow and not _looks_like_ours(plan.engine_words) else read_engine_words(plan)


def _looks_like_ours(words: Sequence[str]) -> bool:
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    return any(difflib.get_close_matches(flag, OPTIONS, 1, _ALIKE) for flag in flags)
