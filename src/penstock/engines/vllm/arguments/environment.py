"""Environment variables that vLLM reads while it is imported. The user's own values win."""

from __future__ import annotations

import logging
import os
import warnings

from penstock import json_logs
from penstock.engines.vllm.arguments.defaults import Shape
from penstock.temporary_folder import short_place

MEDIA_CONNECTOR = "penstock"
"""The name of our `MediaConnector` in vLLM's registry."""

_CONNECTOR = "VLLM_MEDIA_CONNECTOR"
_ALWAYS = {
    _CONNECTOR: MEDIA_CONNECTOR,  # vLLM's own fetches any URL that a request names
    "VLLM_MAX_N_SEQUENCES": "128",  # OpenAI's limit; vLLM's 16,384 take the engine a minute per request
    "VLLM_NO_USAGE_STATS": "1",  # our users' servers do not report to third parties
    "HF_HUB_DISABLE_TELEMETRY": "1",  # the same of the hub's client
    "VLLM_MAX_AUDIO_DECODE_DURATION_S": "3600",  # vLLM's 600 would refuse 25 MB of plain WAV, 13 minutes
    "VLLM_MAX_IMAGE_PIXELS": str(1 << 25),  # an 8K picture; vLLM's 179 million take 2 GB, from 20 kB of PNG
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # else a CPU engine tells each time to which NUMA node it is bound
    "VLLM_LOGGING_LEVEL": "WARNING",  # we show the phases of a start
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked child of a Ray actor hides the actor's death from Ray
}
_CPU_TINY = {
    "OMP_NUM_THREADS": "1",  # threads spin longer than a toy computes: 64 requests in 7 s, instead of 0.6 s
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes longer than the model will ever run
    "VLLM_LOGGING_LEVEL": "ERROR",  # a dozen warnings that a toy could be faster
}
_SOCKET_NAME_BYTES = 37  # a slash and a UUID
_TRITON = "vllm.triton_utils.importing"
_PLUGINS, _PORT = "VLLM_PLUGINS", "VLLM_PORT"
_OUR_PLUGIN = "penstock"


def prepare(shape: Shape) -> None:
    """Set our defaults in this process, from which the core and its workers inherit them.

    Call it before vLLM, or torch, is imported.
    """
    defaults = dict(_ALWAYS)
    if shape.cpu:
        # Else vLLM turns "uni" into "mp": one process more, 5 s later.
        defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if shape.workers > 1:  # vLLM binds each worker to a NUMA node of its own, or fails
            defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        defaults |= _CPU_TINY if shape.tiny else {}
    if shape.gpu_share < 1:
        defaults["VLLM_RAY_PER_WORKER_GPUS"] = f"{shape.gpu_share:g}"  # else a worker asks for a whole one
    if (place := short_place(_SOCKET_NAME_BYTES)) is not None:
        defaults["VLLM_RPC_BASE_PATH"] = place
    if not shape.media_rules:
        del defaults[_CONNECTOR]
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # what vLLM will have to change
    logging.getLogger(_TRITON).setLevel(logging.ERROR)  # that a CPU has none
    json_logs.prepare_vllm(os.environ["VLLM_LOGGING_LEVEL"].upper())
    allowed = os.environ.get(_PLUGINS)
    if allowed is not None and _OUR_PLUGIN not in allowed.split(","):
        # Else workers are not tied to their owner.
        os.environ[_PLUGINS] = ",".join(filter(None, [allowed, _OUR_PLUGIN]))
    if "://" in os.environ.get(_PORT, ""):  # of a Kubernetes Service named `vllm`; vLLM would not start
        del os.environ[_PORT]
