"""The arguments of vLLM's own server: its parser, and what it checks. Importing this file imports vLLM."""

from __future__ import annotations

try:
    from vllm.entrypoints.launchers.cli_args import (
        FrontendArgs,
        make_arg_parser,
        validate_parsed_serve_args,
    )
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("vllm."):  # what vLLM itself needs
        raise
    # from vLLM 0.33 on
    from vllm.entrypoints.common.cli_args import (  # pyright: ignore[reportMissingImports]
        FrontendArgs,
        make_arg_parser,
        validate_parsed_serve_args,
    )

__all__ = ["FrontendArgs", "make_arg_parser", "validate_parsed_serve_args"]
