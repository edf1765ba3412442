"""A processor: dataset in, lazy dataset out.

Builds the operators of Ray Data: the user's preprocessing in tasks or actors, the engines in a pool of
actors, the user's postprocessing after them.
"""

from __future__ import annotations

import inspect
import logging
import math
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pandas as pd
import ray.data
from ray.data import ActorPoolStrategy, Dataset

from penstock.data.pipeline.batch_columns import ROW
from penstock.data.pipeline.configs import ProcessorConfig
from penstock.data.pipeline.engine_stage import EngineStage
from penstock.data.pipeline.model_configs import ModelProcessorConfig
from penstock.data.pipeline.row_program import Program
from penstock.data.pipeline.stage_spec import stage_spec
from penstock.data.pipeline.user_steps import CastEmptyColumns, Postprocess, Preprocess
from penstock.data.rows.input_columns import REQUIRED_INPUT
from penstock.errors import ConfigError
from penstock.processes.quiet import quiet

log = logging.getLogger(__name__)

_CALLS_OPTION = "max_concurrent_calls_per_actor"
"""Of a pool since Ray 2.59; before, it is an option of the actors, `max_concurrency`."""

UserStep = Callable[..., Any] | type
"""A function of a row, plain or async; one marked `batched`; or a class whose objects are such functions."""

_OVERSUBSCRIPTION = 8
"""Oversubscription factor: rows in an actor per row that its engine runs at a time. A call returns when its
slowest row is done, so most of its rows are finished earlier (measured: 7 of 32 active, with 57 tokens on
average and 400 at most). A larger factor strands rows on one actor at the end of the input."""

_CALLS = 64
"""Calls that an actor runs at a time, as far as `_MIN_ROWS` and the rows per batch allow."""

_MIN_ROWS, _MIN_CALLS, _MAX_CALLS = 8, 4, 128
_SCALING_FACTOR = 2
"""Calls in flight per call that an actor runs, for a pool that may grow: Ray Data adds an actor at a ratio of
1.75."""

_OWN = frozenset(
    {
        "batch_format",
        "zero_copy_batch",
        "fn_args",
        "fn_kwargs",
        "fn_constructor_args",
        "fn_constructor_kwargs",
    }
)
"""Options of `map_batches` that the stages set."""

_OF_THE_POOL = frozenset({"compute", "concurrency", "batch_size"})
"""More of them, for the stage with the engines: the processor's config says them."""


@dataclass(frozen=True, slots=True)
class ProcessorStage:
    """The stage with the engines, or with the clients of a service.

    map_batches_kwargs: Ray Data's options of its actors (`num_cpus`, `memory`, `runtime_env`, ...), which win
    over those that follow from the config. What is set here counts in the next call of the processor.
    """

    name: str
    map_batches_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


class Processor:
    """`processor(dataset)` returns a lazy dataset; for a list or a DataFrame, the results as such."""

    DATA_COLUMN: ClassVar[str] = ROW
    """A column that datasets must not have; more names are reserved, see `batch_columns`."""

    def __init__(
        self,
        config: ProcessorConfig,
        preprocess: UserStep | None = None,
        postprocess: UserStep | None = None,
        preprocess_map_kwargs: Mapping[str, Any] | None = None,
        postprocess_map_kwargs: Mapping[str, Any] | None = None,
        builder_kwargs: Mapping[str, Any] | None = None,
        *,
        program: Program | None = None,
    ) -> None:
        """preprocess: row -> request fields; without it, the row itself is the request.
        postprocess: row with the result columns -> output row; without it, all columns are the output.
        program: `async def program(row, llm)` makes many requests for one row and returns its output.
        *_map_kwargs: Ray Data's options of these stages (`num_cpus`, `concurrency`, `memory`, ...).
        builder_kwargs: `chat_template_kwargs`, variables of the chat template, for vLLM and SGLang.
        Raises: ConfigError.
        """
        config = _with_builder_kwargs(config, builder_kwargs or {})
        before, after = dict(preprocess_map_kwargs or {}), dict(postprocess_map_kwargs or {})
        _check_step("preprocess", preprocess)
        _check_step("postprocess", postprocess)
        _check_options("preprocess_map_kwargs", before)
        _check_options("postprocess_map_kwargs", after)
        self.config = config
        self._stage = stage_spec(config, program)
        self._stages = {self._stage.name: ProcessorStage(self._stage.name)}
        self._steps = preprocess, postprocess
        self._options = before, after

    def __call__(self, rows: Any) -> Any:
        if isinstance(rows, Dataset):
            return self._pipeline(rows)
        with quiet(own=True):
            return self._answered(rows)

    def _answered(self, rows: Any) -> Any:
        """At once. Ray Data's plan and its progress are about a pipeline that the user does not see."""
        if isinstance(rows, pd.DataFrame):
            return self._pipeline(ray.data.from_pandas(rows)).to_pandas() if len(rows) else self._empty(rows)
        packed = [{ROW: pickle.dumps(row)} for row in rows]
        if not packed:
            return []
        answered = self._pipeline(ray.data.from_items(packed), is_packed=True)
        answered.context.execution_options.preserve_order = True
        return [pickle.loads(row[ROW]) for row in answered.take_all()]

    def list_stage_names(self) -> list[str]:
        """One name: chat templates, tokenizing and media have no stages of their own here."""
        return list(self._stages)

    def get_stage_by_name(self, name: str) -> ProcessorStage:
        """Raises: ConfigError, a ValueError, for a name that `list_stage_names` does not have."""
        if name not in self._stages:
            raise ConfigError(
                f"There is no stage '{name}'; this processor has {', '.join(self._stages)}, in which the "
                "engine does all of a row's work (chat template, tokenizing, media)."
            )
        return self._stages[name]

    def log_input_column_names(self) -> None:
        """Logs which columns the engine needs."""
        log.info("A row needs %s.", REQUIRED_INPUT[self.config.task_type])

    def _pipeline(self, dataset: Dataset, is_packed: bool = False) -> Dataset:
        (preprocess, postprocess), (before, after) = self._steps, self._options
        size = self.config.rows_per_batch
        build = (self._stage.build_request, is_packed)
        preprocessed = _mapped(dataset, Preprocess, preprocess, build, before, size)
        engine_rows, calls = call_shape(self._stage.concurrent_requests, size)
        options = self._stages[self._stage.name].map_batches_kwargs
        _check_options(f"map_batches_kwargs of {self._stage.name}", options, _OWN | _OF_THE_POOL)
        answered = preprocessed.repartition(target_num_rows_per_block=engine_rows).map_batches(
            EngineStage,
            batch_format="pyarrow",
            batch_size=engine_rows,
            zero_copy_batch=True,
            **_pool(self.config, calls),
            fn_constructor_args=(self._stage, self.config.retry_policy, self.config.journal),
            **self._stage.resources() | options,
        )
        args = (
            self._stage.columns,
            self._stage.request_fields,
            self.config.should_continue_on_error,
            is_packed,
            self.config.names_failures,
        )
        return _mapped(answered, Postprocess, postprocess, args, after, size).map_batches(
            CastEmptyColumns(self._stage.schema),
            batch_format="pyarrow",
            zero_copy_batch=True,
            batch_size=None,
        )

    def _empty(self, rows: pd.DataFrame) -> pd.DataFrame:
        """The columns of an empty result; those of a postprocess are unknown without rows."""
        if self._steps[1] is not None:
            return rows.copy()
        names = [name for name in self._stage.schema.names if name not in rows.columns]
        return rows.reindex(columns=[*rows.columns, *names])


build_processor = Processor
build_llm_processor = Processor
"""The older name."""


def _with_builder_kwargs(config: ProcessorConfig, kwargs: Mapping[str, Any]) -> ProcessorConfig:
    """Raises: ConfigError for what is not `chat_template_kwargs` of an engine."""
    if not kwargs:
        return config
    if not isinstance(config, ModelProcessorConfig):
        raise ConfigError(
            f"builder_kwargs: {', '.join(kwargs)}: without effect with {type(config).__name__}; leave it out."
        )
    if unknown := sorted(kwargs.keys() - {"chat_template_kwargs"}):
        raise ConfigError(
            f"builder_kwargs: {', '.join(unknown)} is not known; it takes `chat_template_kwargs`. Functions "
            "and their options are arguments of build_processor itself."
        )
    return config.with_template_kwargs(dict(kwargs["chat_template_kwargs"]))


def _check_step(name: str, step: object) -> None:
    """Raises: ConfigError for what cannot be called, such as a list of stages."""
    if step is not None and not callable(step):
        raise ConfigError(
            f"{name} is a {type(step).__name__}; it must be a function of a row, or a class. "
            "Use build_processor(config, preprocess, postprocess): the stages follow from the config."
        )


def _check_options(name: str, options: Mapping[str, Any], own: frozenset[str] = _OWN) -> None:
    """Raises: ConfigError for options that the stages set."""
    if wrong := sorted(own & options.keys()):
        raise ConfigError(
            f"{name}: {', '.join(wrong)} cannot be set: rows reach your function as dicts. Other options of "
            "Ray Data's map can: num_cpus, num_gpus, memory, concurrency, batch_size, ..."
        )


def call_shape(concurrent: int, most_rows: int) -> tuple[int, int]:
    """Rows in a call of an actor, and calls that it runs at a time.

    concurrent: rows that its engine runs at a time. most_rows: in a call.
    """
    rows = min(most_rows, max(_MIN_ROWS, _OVERSUBSCRIPTION * concurrent // _CALLS))
    wanted = math.ceil(_OVERSUBSCRIPTION * concurrent / rows)
    return rows, min(_MAX_CALLS, max(_MIN_CALLS, wanted))


def _pool(config: ProcessorConfig, calls: int) -> dict[str, Any]:
    """Options of `map_batches` for a pool whose actors run several calls at a time."""
    least, most = config.get_concurrency().values()
    if least != most:
        calls = min(calls, _CALLS)  # what waits for an actor makes the pool grow
    pool: dict[str, Any] = {
        "min_size": least,
        "max_size": most,
        "initial_size": least,
        "max_tasks_in_flight_per_actor": calls if least == most else _SCALING_FACTOR * calls,
        "enable_true_multi_threading": True,
    }
    if _CALLS_OPTION in inspect.signature(ActorPoolStrategy).parameters:
        pool[_CALLS_OPTION] = calls
        return {"compute": ActorPoolStrategy(**pool)}
    return {"compute": ActorPoolStrategy(**pool), "max_concurrency": calls}


def _mapped(
    dataset: Dataset, step: type, function: Any, args: tuple[Any, ...], options: Mapping[str, Any], size: int
) -> Dataset:
    """`step` over `function`: in actors if it is a class, with one instance in each, else in tasks."""
    fixed: dict[str, Any] = {"batch_format": "pyarrow", "batch_size": size, **options}
    if not inspect.isclass(function):
        return dataset.map_batches(step(function, *args), **fixed)
    if "concurrency" not in fixed and "compute" not in fixed:
        fixed["concurrency"] = 1
    return dataset.map_batches(step, fn_constructor_args=(function, *args), **fixed)
