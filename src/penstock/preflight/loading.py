"""Will it load: what in a model's files, or in the engine's arguments for them, would stop a start."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from os.path import exists, expanduser
from pathlib import Path
from typing import Any

from penstock.config.messages.problems import nearest
from penstock.engines import peft, weights
from penstock.engines.vllm.arguments import names
from penstock.preflight.devices import GIB, Devices
from penstock.preflight.files import ModelFiles
from penstock.preflight.fit import MemoryFit
from penstock.preflight.model import NO_LENGTH_KEY, ModelSize
from penstock.preflight.sizes import Sizes

_TOKENIZERS = re.compile(
    r"tokenizer\.json|tekken\.json|tokenization_.*|.*vocab.*|.*\.(model|spm|tiktoken)(\..*)?"
)
_INDEX = "model.safetensors.index.json"
_COUNTS = (
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_num_seqs",
    "max_num_batched_tokens", "block_size", "max_loras", "max_lora_rank",
)  # fmt: skip
_TRACKED = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags for training, which Transformers adds to Jinja."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """text: what is wrong, what is allowed, what to do. argument: of the engine, if one is at fault.

    certain: it would end a start, else it may.
    """

    text: str
    argument: str | None = None
    certain: bool = True


def without_config(files: ModelFiles) -> Mistake | str:
    """About a folder without config.json: another form of a model, or none."""
    if any(name == "params.json" or name.endswith(".gguf") for name in files.sizes):
        return "not known: what it takes; it has no config.json."
    inner = sorted(file.parent for file in files.folder.glob("*/config.json"))
    hint = f"Did you mean {inner[0]}?" if inner else "Copy or download the model again."
    return Mistake(f"it has no config.json, so it is no model. {hint}")


def of_values(arguments: Mapping[str, Any]) -> Iterator[Mistake]:
    """What vLLM would refuse for any model."""
    for name in _COUNTS:
        if isinstance(value := arguments.get(name), int) and value < 1:
            yield Mistake(f"{value} is not possible. Give at least 1.", name)
    share = arguments.get("gpu_memory_utilization")
    if isinstance(share, int | float) and not 0 < share <= 1:
        text = f"{share:g} is not possible. Give a share of a GPU's memory, above 0 and at most 1."
        yield Mistake(text, "gpu_memory_utilization")
    for name, allowed in names.choices().items():
        value = arguments.get(name)
        if allowed and isinstance(value, str) and value not in allowed:
            guess = nearest(value, allowed)
            hint = f" Did you mean {guess!r}?" if guess else ""
            yield Mistake(f"{value!r} is not known.{hint} There are: {', '.join(allowed)}.", name)
    tokenizer = str(arguments.get("tokenizer"))
    if tokenizer.startswith(("/", "./", "../", "~")) and not exists(expanduser(tokenizer)):
        yield Mistake(f"there is no folder {tokenizer!r}. Correct it, or give a hub id.", "tokenizer")


def of_sizes(model: ModelSize, sizes: Sizes) -> Iterator[Mistake]:
    """What vLLM would refuse of the sizes."""
    length, limit = sizes.max_model_len or 0, model.max_length
    allowed = os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") not in (None, "0")
    if length > limit and model.length_key != NO_LENGTH_KEY and not allowed:
        text = f"{length} is above the model's {limit:,} ({model.length_key} of config.json)."
        certain = not model.pooling  # sentence_bert_config.json may say more
        yield Mistake(f"{text} Give at most {limit}.", "max_model_len", certain)
    tensor, kv = sizes.tensor_parallel_size, model.kv_heads
    if model.heads % tensor or (kv and kv % tensor and tensor % kv):
        numbers = [n for n in range(1, model.heads + 1) if not model.heads % n and not (kv % n and n % kv)]
        text = f"{model.heads} attention heads, {kv} of the KV cache, cannot be split over {tensor} GPUs."
        yield Mistake(f"{text} Give one of {', '.join(map(str, numbers))}.", "tensor_parallel_size")
    if sizes.pipeline_parallel_size > model.blocks:
        text = f"the model has only {model.blocks} layers. Give at most that."
        yield Mistake(text, "pipeline_parallel_size")


def of_files(files: ModelFiles, model: ModelSize, arguments: Mapping[str, Any]) -> Iterator[Mistake]:
    """What is missing or broken in the files."""
    known, gone = names.architectures()
    name, own_code = model.architecture, "auto_map" in files.read("config.json")
    if known and name not in known and not (own_code or _in_transformers(model.model_type)):
        guess = nearest(name, known)
        hint = f" {gone[name]} dropped it." if name in gone else f" Did you mean {guess!r}?" if guess else ""
        text = f"the installed vLLM has no architecture {name!r} (config.json: architectures).{hint}"
        yield Mistake(f"{text} Serve it with a vLLM that has it, or correct the name.")
    has_tokenizer = any(_TOKENIZERS.fullmatch(Path(name).name) for name in files.sizes)
    if not (has_tokenizer or arguments.get("tokenizer") or arguments.get("skip_tokenizer_init")):
        text = "there is no tokenizer: neither tokenizer.json nor tokenizer.model."
        yield Mistake(f"{text} Copy it from the original model, or name another (`--tokenizer NAME`).")
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json", _INDEX):
        try:
            found = files.read(name)
        except ValueError:
            yield Mistake(f"{name} is no valid JSON. Correct it, or copy it again.")
        else:
            named: Any = found.get("weight_map") if name == _INDEX else None
            for shard in sorted({*named.values()} - files.sizes.keys()) if isinstance(named, dict) else ():
                yield Mistake(
                    f"{shard} is not there, which {_INDEX} names. Copy or download it.", certain=False
                )
    if (missing := files.missing_bytes()) > (free := shutil.disk_usage(files.folder).free):
        text = f"its download is {missing / GIB:.1f} GiB, and the hub's cache has room for {free / GIB:.1f}."
        yield Mistake(f"{text} Free some, or set HF_HOME to another disk.", certain=False)


def _in_transformers(model_type: str) -> bool:
    """Whether Transformers has the type: vLLM may run it by that."""
    found = find_spec("transformers")
    folder = model_type.replace("-", "_")
    return bool(found and found.origin and (Path(found.origin).parent / "models" / folder).is_dir())


def of_adapters(files: ModelFiles, max_rank: int, folders: Sequence[Path]) -> Iterator[Mistake]:
    """Adapters that this model cannot take. Raises: Broken for the model's own files."""
    base = {name: tensor.shape for name, tensor in files.tensors.items()}
    for folder in folders:
        try:
            peft.check(folder, max_rank, base)
        except weights.Broken as broken:
            yield Mistake(f"the adapter in {folder} cannot be loaded: {broken}.", certain=False)


def of_devices(sizes: Sizes, devices: Devices) -> Iterator[Mistake]:
    """Too few GPUs, or too little that is free on them."""
    wanted = sizes.gpus * sizes.data_parallel_size
    if wanted > devices.count:
        text = f"it needs {wanted} GPUs (tensor x pipeline x data parallel), and there are {devices.count}."
        yield Mistake(f"{text} Lower these sizes.", "tensor_parallel_size", certain=False)
    total, free = devices.memory_bytes, devices.free_bytes
    if free is not None and free < total * sizes.gpu_memory_utilization:
        text = f"only {free / GIB:.1f} of a GPU's {total / GIB:.1f} GiB are free; `nvidia-smi` lists who has"
        text = f"{text} the rest. End that, or give at most {int(100 * free / total) / 100}."
        yield Mistake(text, "gpu_memory_utilization", certain=False)


def of_fit(fit: MemoryFit) -> Iterator[Mistake]:
    """What lacks, and each way that works."""
    if not (fit.devices and fit.lacking_bytes):
        return
    beside = fit.reserve_bytes + fit.adapters_bytes
    parts = (fit.lacking_bytes, fit.weights_bytes, fit.request_bytes, beside, fit.budget_bytes)
    lacking, held, request, more, budget = (f"{size / GIB:.1f}" for size in parts)
    text = (
        f"{lacking} GiB are lacking on {fit.sizes.gpus} x {fit.devices.each}: weights {held}, KV cache of a "
        f"request of {fit.context:,} tokens {request}, some {more} beside; vLLM takes {budget} of each GPU."
    )
    ways = "".join(f"\n  {words}: {gives}" for words, gives in fit.ways)
    text = f"{text} It fits with{ways}" if ways else f"{text} No other size makes it fit."
    yield Mistake(text, certain=fit.certain)


def of_template(files: ModelFiles, model: ModelSize, arguments: Mapping[str, Any]) -> Iterator[Mistake | str]:
    """What is wrong with the chat template, or what users should know of it."""
    given = arguments.get("chat_template")
    try:
        template, special = _template(files, given), files.read("tokenizer_config.json")
    except FileNotFoundError:
        yield Mistake(f"there is no file {given!r}.", "chat_template")
        return
    except (OSError, ValueError):
        return  # said by `of_files`
    if model.pooling or model.model_type == "whisper" or (template is None and "tekken.json" in files.sizes):
        return
    if template is None:
        yield "it has no chat template: chat requests are refused. `--chat-template FILE` gives one."
    elif find_spec("jinja2") is None:
        yield "its chat template was not tried: jinja2 is not installed here."
    elif fault := _render_fault(template, special):
        text = f"the chat template does not render a chat: {fault}. Correct it, or give another"
        wants_more = not fault.startswith(
            ("TemplateSyntaxError", "SecurityError")
        )  # than a question, perhaps
        argument = "chat_template" if given else None
        yield Mistake(f"{text} (`--chat-template FILE`).", argument, certain=not wants_more)


def _template(files: ModelFiles, given: str | None) -> str | None:
    if given:
        return given if "{" in given else Path(expanduser(given)).read_text()
    if (file := files.folder / "chat_template.jinja").is_file():
        return file.read_text()
    found: Any = files.read("chat_template.json").get("chat_template")
    found = found or files.read("tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        return next((one.get("template") for one in found if one.get("name") == "default"), None)
    return found


def _render_fault(template: str, special: Mapping[str, Any]) -> str | None:
    """Renders a chat as Transformers does: in a sandbox, with its functions."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: object, **_: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    options: dict[str, Any] = {
        "trim_blocks": True,
        "lstrip_blocks": True,
        "extensions": ["jinja2.ext.loopcontrols"],
    }
    environment: Any = ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=refuse, strftime_now=str)
    values: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
    for name, value in special.items():
        if name.endswith("_token"):
            values[name] = value.get("content") if isinstance(value, dict) else value
    faults: list[str] = []
    for content in ("Hello", [{"type": "text", "text": "Hello"}]):
        try:
            compiled = environment.from_string(_TRACKED.sub("", template))
            compiled.render(messages=[{"role": "user", "content": content}], **values)
        except Exception as error:  # a template may do anything
            faults.append(f"{type(error).__name__}: {error}".rstrip("."))
    return faults[0] if len(faults) > 1 else None
