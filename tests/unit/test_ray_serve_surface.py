"""Every public name of the installed Ray's `ray.serve.llm`, with its arguments: here the same, or explained.

"The same" is computed: what Ray's signature takes, ours takes; a config's field has the same default. All
else is in one of the tables below, each entry with its reason. A new name of a new Ray fails by that name.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
from pydantic import BaseModel
from tests.unit.ray_surface import Entry, surface

from penstock.config import LLMConfig
from penstock.serve import ingress

pytestmark = pytest.mark.parity("S34")

RAYS = surface("ray.serve.llm")

ALIASES = {
    # Called in the same way; the signature says why it is not the same.
    "LLMConfig.parse_yaml": "YAML is always read safely: there is no Loader to choose.",
    "LLMServingArgs.parse_yaml": "As of LLMConfig.",
    "ModelLoadingConfig.parse_yaml": "As of LLMConfig.",
    "CloudMirrorConfig.parse_yaml": "As of LLMConfig.",
    "LoraConfig.parse_yaml": "As of LLMConfig.",
    "LLMConfig.from_file": "As parse_yaml.",
    "LLMServingArgs.from_file": "As parse_yaml.",
    "ModelLoadingConfig.from_file": "As parse_yaml.",
    "CloudMirrorConfig.from_file": "As parse_yaml.",
    "LoraConfig.from_file": "As parse_yaml.",
    "CloudMirrorConfig.bucket_uri": "Required: without one there is no mirror.",
    "openai_api_models.TranscriptionRequest.request_id": "Taken as any other field.",
}

REFUSED = {
    # What a user reads who writes them.
    "LLMConfig.apply_checkpoint_info": "a config does not read the model",
    "LLMConfig.supports_vision": "a config does not read the model",
    "LLMConfig.model_architecture": "a config does not read the model",
    "LLMConfig.input_modality": "a config does not read the model",
    "LLMConfig.multiplex_config": "the limits of adapters are in `lora_config`",
    "LLMConfig.get_or_create_callback": "name its class in `callback_config`",
    "LLMConfig.setup_engine_backend": "set engine_kwargs.kv_transfer_config, or `prefill`",
    "LLMConfig.kv_connector_backend": "set engine_kwargs.kv_transfer_config, or `prefill`",
    "deployment.PDDecodeServer": "Write build_pd_openai_app",
    "deployment.PDPrefillServer": "Write build_pd_openai_app",
    "request_router.KVAwareRouter": "Leave request_router_class out",
}

NOT_FOR_PROGRAMS = {
    # Public by their names in Ray; no program of its documentation uses them.
    "request_router.PrefixCacheAffinityRouter.apply_locality_routing": "Of Serve's LocalityMixin, by which "
    "routers prefer their own node.",
    "request_router.PrefixCacheAffinityRouter.rank_replicas_via_locality": "As above.",
}


def ours(name: str) -> Any:
    """What we have under a name below `ray.serve.llm`. Raises: LookupError, or the refusal."""
    first, _, rest = name.partition(".")
    modules = ("deployment", "ingress", "openai_api_models", "request_router")
    found: Any = import_module(f"penstock.serve.{first}" if first in modules else "penstock.serve")
    for part in (rest if first in modules else name).split("."):
        if isinstance(found, type) and issubclass(found, BaseModel) and part in found.model_fields:
            return found.model_fields[part]
        if not hasattr(found, part):
            raise LookupError(name)
        found = getattr(found, part)
    return found


def difference(name: str, rays: Entry) -> str:
    """Why ours is not the same; "" when it is."""
    try:
        found = ours(name)
    except (LookupError, ImportError) as error:
        return f"missing: {error!r}"
    if rays.kind == "field":
        return _other_default(rays.signature, found)
    if rays.kind in ("class", "function", "method") and rays.signature:
        return _does_not_take(rays.signature, found, bound=rays.kind != "function")
    return ""


def _other_default(theirs: str, field: Any) -> str:
    if theirs == "required":
        return "" if field.is_required() else "it is not required"
    try:
        expected = ast.literal_eval(theirs)
    except ValueError:  # a name, or a factory
        return "" if not field.is_required() else "it is required"
    own = field.get_default(call_default_factory=True)
    return "" if own == expected or (not own and not expected) else f"its default is {own!r}, not {theirs}"


def _does_not_take(theirs: str, found: Any, *, bound: bool) -> str:
    """Whether a call by Ray's signature would fail: each parameter by its name and by its position."""
    own = list(inspect.signature(found.__init__ if isinstance(found, type) else found).parameters.values())
    if bound and own and own[0].name in ("self", "cls"):
        own = own[1:]
    named = {parameter.name: parameter for parameter in own}
    any_named = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own)
    for place, wanted in enumerate(_parameters(theirs)):
        if wanted.kind is wanted.VAR_KEYWORD:
            if not any_named:
                return "it takes no further arguments"
            continue
        mine = named.get(wanted.name)
        if mine is None and not any_named:
            return f"it does not take {wanted.name!r}"
        if mine is not None and wanted.kind is wanted.POSITIONAL_OR_KEYWORD and own[place] is not mine:
            return f"{wanted.name!r} has another position"
        if mine is not None and wanted.default is not wanted.empty and mine.default is mine.empty:
            return f"{wanted.name!r} is required"
    wants = {wanted.name for wanted in _parameters(theirs)}
    must = [
        p.name
        for p in own
        if p.name not in wants and p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    return f"it also wants {must}" if must else ""


def _parameters(text: str) -> Iterator[inspect.Parameter]:
    arguments = ast.parse(f"def f{text}: ...").body[0].args  # type: ignore[attr-defined]
    positional = arguments.args
    optional = len(positional) - len(arguments.defaults)
    kinds = inspect.Parameter
    for place, argument in enumerate(positional):
        default = None if place >= optional else kinds.empty
        yield kinds(argument.arg, kinds.POSITIONAL_OR_KEYWORD, default=default)
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if not argument.arg.startswith("_"):
            yield kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None)
    if arguments.kwarg:
        yield kinds(arguments.kwarg.arg, kinds.VAR_KEYWORD)


def accounted(name: str) -> bool:
    tables = (*ALIASES, *REFUSED, *NOT_FOR_PROGRAMS)
    return name in tables or any(name.startswith(f"{known}.") for known in REFUSED)


def test_every_name_of_rays_serve_llm_is_the_same_here_or_accounted_for():
    unknown = {
        name: found
        for name, entry in RAYS.items()
        if not accounted(name) and (found := difference(name, entry))
    }
    assert unknown == {}


def test_the_tables_have_nothing_that_is_the_same_or_gone():
    stale = [
        name
        for name in (*ALIASES, *REFUSED, *NOT_FOR_PROGRAMS)
        if name not in RAYS or not difference(name, RAYS[name])
    ]
    assert stale == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_name_says_what_to_write_instead(name):
    config = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim")
    first, _, attribute = name.partition(".")
    with pytest.raises((AttributeError, ImportError)) as caught:
        getattr(config if first == "LLMConfig" else import_module(f"penstock.serve.{first}"), attribute)
    assert REFUSED[name] in str(caught.value)


def test_default_endpoints_are_rays():
    """Ray's documentation builds its maps from them; their names are those of the ingress's methods."""
    methods = {name.rpartition(".")[2] for name in RAYS if name.startswith("ingress.OpenAiIngress.")}
    assert methods - set(ingress.DEFAULT_ENDPOINTS) == {"get_deployment_options", "check_health", "model"}
