"""Checks a plan before Ray starts: mistakes that would otherwise cost a minute. Takes no second."""

from __future__ import annotations

import os
from collections.abc import Sequence

from penstock import ray_version
from penstock.cli.models.engine_arguments import read_quick_words
from penstock.cli.models.faults import missing_folders, quick_faults
from penstock.cli.models.installed import missing_engine
from penstock.cli.models.options import SERVE, YAML, Arguments, CommandOptions
from penstock.cli.models.plan import ServePlan
from penstock.config import LLMConfig
from penstock.config.derive.accelerators import missing_here
from penstock.config.derive.prefill import halves
from penstock.config.messages.problems import config_error
from penstock.errors import ConfigError, EngineStartFailed


def with_all_faults(error: ConfigError, arguments: Arguments) -> ConfigError:
    """The error, and all else that is found in the same files without asking an engine."""
    files = [word for word in arguments.sources if word.endswith(YAML) and os.path.isfile(word)]
    return config_error(dict.fromkeys([*(error.problems or [str(error)]), *quick_faults(files)]))


def checked(plan: ServePlan, address: str | None, command: CommandOptions = SERVE) -> ServePlan:
    """The plan, with its engine's arguments read where that is quick. address: that of a cluster, if given.

    Raises: ConfigError; Unavailable for a Ray that is too old; EngineStartFailed when an engine is not
    installed. Without an address, the cluster is this machine alone.
    """
    ray_version.check()
    configs = [half for config in plan.configs for half in halves(config)]
    if address is None:
        _refuse_missing(configs)
    plan = read_quick_words(plan, command)
    if address is None and (lacking := [text for one in configs if (text := missing_engine(one))]):
        raise EngineStartFailed("\n".join(dict.fromkeys(lacking)))
    return plan


def refuse_certificate(plan: ServePlan) -> None:
    """Raises: ConfigError when it cannot be used: the gateway runs on this machine, on whatever cluster."""
    if (tls := plan.gateway.tls) is not None:
        from penstock.serve.http.tls import Certificate

        Certificate(tls.cert, tls.key)


def _refuse_missing(configs: Sequence[LLMConfig]) -> None:
    problems = [text for config in configs if (text := missing_here(config)) is not None]
    problems += [text for config in configs for text in missing_folders(config)]
    if problems:
        raise config_error(dict.fromkeys(problems))
