"""The user's own code around a model: how it is named, and its options.

The code itself is imported and called in `penstock.hooks`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from penstock.config.messages.problems import CheckedDict
from penstock.config.schema.deployment import DeploymentOptions, with_variables_of_actor
from penstock.config.schema.strict import StrictModel, setting

IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class PreprocessorOptions(DeploymentOptions):
    """Options of Serve's deployment (as in `deployment_config`), and these."""

    arguments: dict[str, Any] = setting({}, "Arguments of the class.")
    timeout_s: float = setting(
        60.0, "How long a request waits for the deployment's answer, tries included.", gt=0
    )


OwnPreprocessor = Annotated[
    dict[str, Any], CheckedDict(PreprocessorOptions), AfterValidator(with_variables_of_actor)
]


class PostprocessorOptions(StrictModel):
    """Options of the code behind the engine."""

    arguments: dict[str, Any] = setting({}, "Arguments of the class.")


def checked_hook(value: Any) -> Any:
    """Raises: ValueError for what is neither callable nor a path."""
    if value is None or callable(value) or (isinstance(value, str) and IMPORT_PATH.fullmatch(value)):
        return value
    raise ValueError("must be a class, a function, or an import path such as `my_module:Preprocessor`.")


def class_or_path(value: Any) -> Any:
    """Raises: ValueError for what is neither a class nor the import path of one."""
    if value is None or isinstance(value, type) or (isinstance(value, str) and "." in value):
        return value
    raise ValueError("must be a class or an import path such as `my_package.my_module:MyClass`.")


Hook = Annotated[Any, AfterValidator(checked_hook)]
ClassOrPath = Annotated[Any, AfterValidator(class_or_path)]


def own_deployment(options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Serve's options of a preprocessor that is a deployment by itself; None when it runs in the replica."""
    given = {name: value for name, value in (options or {}).items() if name != "arguments"}
    if not given:
        return None
    return {name: value for name, value in given.items() if name != "timeout_s"}


def timeout_s(options: Mapping[str, Any] | None) -> float:
    """Of one request's wait for the deployment."""
    return float((options or {}).get("timeout_s", PreprocessorOptions.model_fields["timeout_s"].default))
