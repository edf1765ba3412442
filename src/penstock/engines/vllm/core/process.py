"""The engine core's process: `python -m penstock.engines.vllm.core.process`, started by `launch`.

It imports what the core needs while the replica imports vLLM's front-end, then reads its config from standard
input and runs vLLM's own core with it. Workers that vLLM spawns import this file as their main module, so it
stays light.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import warnings
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, NoReturn

from penstock.engines.vllm.core import failure_reason, plugin
from penstock.engines.vllm.core.imports import uncollected

READ_BY_IMPORTS = {"VLLM_USE_BREAKABLE_CUDAGRAPH"}
"""Variables that vLLM's config may set, and that its modules read when they are imported."""


def main() -> None:
    multiprocessing.current_process().name = "EngineCore"  # in its log lines, as vLLM's users know it
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # what vLLM will have to change
    plugin.register()
    with uncollected():  # what every model needs; the model's own class follows from the config
        from vllm.platforms import current_platform

        import_module("vllm.v1.engine.core")
        import_module(f"vllm.v1.worker.{'cpu' if current_platform.is_cpu() else 'gpu'}_worker")
    environment: dict[str, str] = pickle.load(sys.stdin.buffer)
    if any(environment.get(name) != os.environ.get(name) for name in READ_BY_IMPORTS):
        _start_again(environment)
    os.environ.update(environment)
    order: Mapping[str, Any] = pickle.load(sys.stdin.buffer)
    if order["executor_class"].uses_ray:  # which copies the environment to workers on any node
        os.environ[plugin.OWNER] = plugin.ENDED_BY_RAY
    status = run(order)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)  # tearing down the interpreter with all of vLLM takes 2 s and frees nothing more


def run(order: Mapping[str, Any]) -> int:
    """Runs vLLM's core until it is stopped. Returns the process's exit status; records the reason of a
    failure.
    """
    core = _core_class(order["capabilities"])
    parallel = order["vllm_config"].parallel_config
    store = None
    try:
        if parallel.data_parallel_size > 1 and not parallel.data_parallel_rank:
            from penstock.engines.vllm.core.leader import lead

            store = lead(order["vllm_config"], order["handshake_address"])
        core.run_engine_core(
            vllm_config=order["vllm_config"],
            executor_class=order["executor_class"],
            handshake_address=order["handshake_address"],
            local_client=True,
            log_stats=True,
            dp_rank=parallel.data_parallel_rank,
        )
        del store  # needed only while cores may start
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    except Exception as error:
        failure_reason.leave(error)
        return 1
    return 0


def _core_class(capabilities: Collection[str]) -> Any:
    """vLLM's core, or ours on top of it, in its place: `run_engine_core` looks up its classes by name."""
    from vllm.v1.engine import core

    if "adapter_layers" in capabilities:
        from penstock.engines.vllm.core import adapter_layers

        core.EngineCore.add_lora = adapter_layers.add_lora
    if "continued_streams" in capabilities:
        from penstock.engines.vllm.continued import core as continued

        continued.take_up(grammars="continued_grammars" in capabilities)
    if "token_groups" in capabilities:
        from penstock.engines.vllm.core.token_buffer import BufferingCore, BufferingGangCore

        core.EngineCoreProc, core.DPEngineCoreProc = BufferingCore, BufferingGangCore
    elif "lasting_core" in capabilities:
        from penstock.engines.vllm.core.sockets import AttentiveCore, AttentiveGangCore

        core.EngineCoreProc, core.DPEngineCoreProc = AttentiveCore, AttentiveGangCore
    return core.EngineCoreProc


def _start_again(environment: Mapping[str, str]) -> NoReturn:
    """Replaces this program by a new one, which imports with this environment and reads the same input."""
    rest = os.memfd_create("config")
    with open(os.dup(rest), "wb") as file:
        file.write(pickle.dumps(environment) + sys.stdin.buffer.read())
    os.lseek(rest, 0, os.SEEK_SET)
    os.dup2(rest, sys.stdin.fileno())
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **environment})


if __name__ == "__main__":
    main()
