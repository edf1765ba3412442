"""The vLLM version that this folder supports: what it uses changes between minor versions."""

from __future__ import annotations

from penstock.errors import EngineStartFailed

SUPPORTED = "0.32"


def check_installed() -> None:
    """Imports vLLM, which takes seconds.

    Raises: EngineStartFailed when it is missing, or another version.
    """
    try:
        import vllm
    except ImportError as error:
        raise EngineStartFailed(
            f"vLLM cannot be imported ({error}); install it with `pip install 'penstock[vllm]'`, "
            "or `'penstock[cpu]'` on a machine without a GPU."
        ) from error
    if not vllm.__version__.startswith(f"{SUPPORTED}."):
        raise EngineStartFailed(
            f"vLLM {vllm.__version__} is installed, but this Penstock works with vLLM {SUPPORTED}.x only; "
            f"install that, for example with `pip install 'vllm=={SUPPORTED}.*'`."
        )
