"""`penstock check MODEL`: whether it loads and fits, from its files alone."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoint import write_llama, write_safetensors

from penstock.cli.models import faults, precheck
from penstock.cli.models.check import check
from penstock.cli.models.options import Arguments
from penstock.cli.models.plan import make_plan
from penstock.errors import ConfigError
from penstock.preflight.devices import devices_here

pytestmark = pytest.mark.parity("X11")

GIB = 1 << 30
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
"""What makes Llama 3.1 70B of 8B."""


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "llama")


@pytest.fixture
def checked(capsys: pytest.CaptureFixture[str]):
    """The exit code and the JSON of a check."""

    def run(model: Path | str, *words: str, gpu: str | None = None) -> tuple[int, dict[str, Any]]:
        code = check([str(model)], words, gpu=gpu, as_json=True)
        found = json.loads(capsys.readouterr().out)
        return code, {**found, **(found["models"] or [{}])[0]}

    return run


@pytest.fixture
def mistake(checked):
    """The only mistake of a check."""

    def run(model: Path | str, *words: str, gpu: str | None = None) -> str:
        code, found = checked(model, *words, gpu=gpu)
        assert (code, len(found["mistakes"])) == (2, 1), found["mistakes"]
        return found["mistakes"][0]

    return run


@pytest.fixture(autouse=True)
def forget_gpus() -> Iterator[None]:
    yield
    devices_here.cache_clear()


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_the_sizes_of_a_70b_model_are_exact(tmp_path: Path, checked):
    code, found = checked(write_llama(tmp_path / "m", **LARGE), "--tensor-parallel-size=4", gpu="H100:4")
    assert code == 0
    assert found["token_bytes"] == 80 * 2 * 128 * 2 * 2  # each GPU has 2 of the 8 heads
    whole, norms = 70_553_706_496 * 2, (2 * 80 + 1) * 8192 * 2
    assert found["weights_bytes"] == (whole - norms) // 4 + norms
    assert found["exact"]


def test_a_gpu_of_a_stage_holds_its_layers(tmp_path: Path, checked):
    folder = write_llama(tmp_path / "m", **LARGE)
    _, one = checked(folder, gpu="H100")
    _, two = checked(folder, "-pp", "2", gpu="H100:2")
    assert one["weights_bytes"] / 2 < two["weights_bytes"] < one["weights_bytes"] / 2 + 5 * GIB
    assert two["token_bytes"] == one["token_bytes"] / 2


def test_kv_heads_are_copied_where_there_are_fewer_than_gpus(llama: Path, checked):
    _, eight = checked(llama, "-tp", "8", gpu="L4:8")
    _, sixteen = checked(llama, "-tp", "16", gpu="L4:16")
    assert eight["token_bytes"] == sixteen["token_bytes"] == 32 * 2 * 128 * 2


def test_a_table_says_what_fits(llama: Path, capsys: pytest.CaptureFixture[str]):
    assert check([str(llama)], ["--max-model-len", "8192"], gpu="L4") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == [str(llama), "LlamaForCausalLM,", "bfloat16"]
    assert lines[1] == ["on", "1", "x", "L4", "(22.0", "GiB),", "gpu_memory_utilization", "0.92"]
    assert lines[2] == ["weights", "15.0", "GiB"]
    assert lines[4][:9] == ["KV", "cache", "3.9", "GiB", "at", "128", "KiB", "a", "token:"]
    assert lines[-1] == ["No", "mistakes", "found."]


def test_each_way_that_is_named_makes_it_fit(llama: Path, checked):
    code, found = checked(llama, gpu="L4")
    assert code == 2
    assert "GiB are lacking on 1 x L4 (22.0 GiB): weights 15.0" in found["mistakes"][0]
    ways = [words for words, _ in found["ways"]]
    assert ways[:3] == [
        "--tensor-parallel-size 2",
        "--max-model-len 31744",
        "--kv-cache-dtype fp8 --max-model-len 63488",
    ]
    for words in ways[:3]:
        code, again = checked(llama, *words.split(), gpu="L4:2")
        assert (code, again["lacking_bytes"], again["requests"] >= 1) == (0, 0, True), words
    _, longer = checked(llama, "--max-model-len", str(31744 + 512), gpu="L4")
    assert longer["lacking_bytes"] > 0


def test_auto_takes_the_longest_context_that_fits(llama: Path, checked):
    code, found = checked(llama, "--max-model-len", "auto", gpu="L4")
    assert (code, found["context"]) == (0, 31744)


def test_float32_is_halved_and_an_old_gpu_computes_in_float16(tmp_path: Path, checked):
    folder = write_llama(tmp_path / "m", "F32", torch_dtype="float32")
    _, new = checked(folder, gpu="L4")
    _, old = checked(folder, gpu="T4")
    assert (new["dtype"], old["dtype"]) == ("bfloat16", "float16")
    assert new["weights_bytes"] == old["weights_bytes"] == 8_030_261_248 * 2


def test_a_quantised_checkpoint_counts_as_its_files(tmp_path: Path, checked):
    quantised = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    folder = write_llama(tmp_path / "m", "F8_E4M3", quantization_config=quantised)
    _, found = checked(folder, gpu="L4")
    assert (found["weights_bytes"], found["token_bytes"], found["exact"]) == (8_030_261_248, 1 << 16, False)


def test_a_checkpoint_that_is_quantised_when_it_loads_takes_half(llama: Path, checked):
    code, found = checked(llama, "--quantization", "fp8", "--max-model-len", "65536", gpu="L4")
    assert (code, found["exact"]) == (0, False)
    assert 8 * GIB < found["weights_bytes"] < 9 * GIB


def test_overrides_of_the_config_count(llama: Path, checked):
    words = ("--hf-overrides", '{"num_key_value_heads": 32, "max_position_embeddings": 4096}')
    _, found = checked(llama, *words, gpu="L4")
    assert (found["token_bytes"], found["context"]) == (4 << 17, 4096)


def test_words_apply_to_the_model_of_a_file(llama: Path, checked, tmp_path: Path):
    file = tmp_path / "m.yaml"
    file.write_text(f"model_loading_config: {{model_id: m, model_source: {llama}}}\n")
    code, found = checked(file, "--max-model-len", "4096", gpu="L4")
    assert (code, found["context"], len(found["models"])) == (0, 4096, 1)


def test_adapters_take_memory(llama: Path, checked):
    _, none = checked(llama, "--max-model-len=8192", gpu="L4")
    words = ("--enable-lora", "--max-loras=4", "--max-lora-rank=64", "--max-model-len=8192")
    _, four = checked(llama, *words, gpu="L4")
    assert none["adapters_bytes"] == 0
    assert 0.5 * GIB < four["adapters_bytes"] == none["cache_bytes"] - four["cache_bytes"]


def test_what_is_not_known_is_said(tmp_path: Path, checked):
    folder = write_llama(tmp_path / "m", model_type="lama9")
    code, found = checked(folder, "--max-model-len=8192", gpu="L4")
    assert code == 0
    assert found["not_checked"] == [
        "m: not known: what a model of type 'lama9' keeps per token; counted like that of others."
    ]
    assert not found["exact"]
    _, found = checked(write_llama(tmp_path / "m"), "--kv-cache-dtype", "nvfp4", gpu="L4")
    assert found["not_checked"] == ["m: not known: what a KV cache of nvfp4 takes."]
    for file in folder.glob("*.safetensors"):
        file.unlink()
    _, found = checked(folder, "--load-format", "dummy", gpu="L4")
    assert "m: not known: the weights; there are none here." in found["not_checked"]


def test_without_a_gpu_only_the_sizes_are_said(llama: Path, checked, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")  # no nvidia-smi
    code, found = checked(llama)
    assert (code, found["request_bytes"]) == (0, 16 * GIB)
    assert "cache_bytes" not in found


def smi(folder: Path, used_mib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An `nvidia-smi` that knows one L4."""
    devices_here.cache_clear()
    monkeypatch.setenv("PENSTOCK_ACCELERATOR", "gpu")
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    row = f"NVIDIA L4, 23034 MiB, 456 MiB, {used_mib} MiB"
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho '{row}'\n")
    (folder / "nvidia-smi").chmod(0o755)


def test_the_gpus_of_this_machine_are_asked(llama: Path, checked, tmp_path: Path, monkeypatch):
    smi(tmp_path, 3, monkeypatch)
    code, found = checked(llama, "--max-model-len", "8192")
    assert (code, found["gpus"]["name"], found["gpus"]["memory_bytes"]) == (0, "L4", (23034 - 456) << 20)
    smi(tmp_path, 9000, monkeypatch)
    code, found = checked(llama, "--max-model-len", "8192")
    assert found["mistakes"] == [
        "--gpu-memory-utilization: only 13.3 of a GPU's 22.0 GiB are free; `nvidia-smi` lists who has the "
        "rest. End that, or give at most 0.6."
    ]


def test_a_model_on_the_cpu_needs_no_gpu(tmp_path: Path, checked, monkeypatch: pytest.MonkeyPatch):
    smi(tmp_path, 9000, monkeypatch)
    monkeypatch.setenv("PENSTOCK_ACCELERATOR", "cpu")
    code, found = checked(write_llama(tmp_path / "large", **LARGE))
    assert (code, "gpus" in found) == (0, False)


def test_serve_refuses_what_certainly_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    smi(tmp_path, 3, monkeypatch)
    monkeypatch.setattr(faults, "missing_here", lambda config: None)  # it looks into /dev
    large, llama = write_llama(tmp_path / "large", **LARGE), write_llama(tmp_path / "llama")

    def refused(model: Path, *words: str) -> str | None:
        try:
            precheck.checked(make_plan(Arguments(sources=(str(model),), engine_words=words)), None)
        except ConfigError as error:
            return str(error)
        return None

    assert "lacking on 1 x L4" in (refused(large) or "")
    assert refused(llama, "--max-model-len", "36864") is None  # lacks by the estimated reserve alone
    assert "lacking on 1 x L4" in (refused(llama, "--max-model-len", "49152") or "")
    assert refused(llama, "--max-model-len", "49152", "--quantization", "fp8") is None
    assert refused(large, "--offload-group-size", "8") is None


def test_another_environment_may_bring_another_engine(llama: Path, tmp_path: Path):
    change(llama / "config.json", architectures=["NextYearForCausalLM"], model_type="next_year")
    file, env = tmp_path / "m.yaml", "runtime_env: {pip: [vllm==9.9]}"
    file.write_text(f"model_loading_config: {{model_id: m, model_source: {llama}}}\n")
    with pytest.raises(ConfigError, match="no architecture 'NextYearForCausalLM'"):
        precheck._refuse_certain(make_plan(Arguments(sources=(str(file),))))
    file.write_text(file.read_text() + env)
    precheck._refuse_certain(make_plan(Arguments(sources=(str(file),))))


def test_the_part_of_a_picture_model_is_overridden_inside(llama: Path, checked):
    text = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({"architectures": ["X"], "text_config": text}))
    _, found = checked(
        llama, "--hf-overrides", '{"text_config": {"max_position_embeddings": 4096}}', gpu="L4"
    )
    assert found["context"] == 4096


@pytest.mark.parametrize(
    ("gpu", "memory"),
    [("H100:2", 79.1), ("nvidia_l4", 22.0), ("A100-80G", 79.1), ("48GiB:2", 48), ("MINE", 30.5)],
)
def test_gpus_are_known_by_name_or_memory(llama: Path, checked, monkeypatch, gpu: str, memory: float):
    monkeypatch.setenv("PENSTOCK_GPUS", "MINE=30.5,OTHER=2")
    _, found = checked(llama, gpu=gpu)
    assert found["gpus"]["memory_bytes"] == int(memory * GIB)


@pytest.mark.parametrize(
    ("gpu", "said"),
    [("H10", "did you mean 'H100'?"), ("L4:x", "'x' is no number"), ("L4:0", "'0' is no number")],
)
def test_an_unknown_gpu_is_named_with_its_neighbour(llama: Path, gpu: str, said: str):
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        check([str(llama)], gpu=gpu)


def test_a_config_is_planned_for_its_accelerator_type(llama: Path, checked, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    file, source = tmp_path / "m.yaml", f"model_loading_config: {{model_id: m, model_source: {llama}}}"
    file.write_text(f"{source}\naccelerator_type: L4\nengine_kwargs: {{max_model_len: 8192}}\n")
    code, found = checked(file)
    assert (code, found["gpus"]["name"], found["lacking_bytes"]) == (0, "L4", 0)
    file.write_text(file.read_text().replace("8192", "200000"))
    code, found = checked(file)
    said = f"{file}:3: engine_kwargs.max_model_len: 200000 is above the model's 131,072"
    assert found["mistakes"][0].startswith(said)


BROKEN: dict[str, tuple[Any, str]] = {
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "no tokenizer: neither tokenizer.json nor"),
    "architecture": (
        lambda m: change(m / "config.json", architectures=["MixtralForCasualLM"], model_type="lama9"),
        "'MixtralForCasualLM' (config.json: architectures). Did you mean 'MixtralForCausalLM'?",
    ),
    "dropped": (
        lambda m: change(m / "config.json", architectures=["MPTForCausalLM"], model_type="lama9"),
        "no architecture 'MPTForCausalLM'",
    ),
    "template syntax": (
        lambda m: change(m / "tokenizer_config.json", chat_template="{% if x %}"),
        "the chat template does not render a chat: TemplateSyntaxError",
    ),
    "template escapes": (
        lambda m: (m / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}"),
        "does not render a chat: SecurityError",
    ),
    "generation config": (
        lambda m: (m / "generation_config.json").write_text("{"),
        "generation_config.json is no valid JSON",
    ),
    "tokenizer": (lambda m: (m / "tokenizer.json").write_text("{"), "tokenizer.json is no valid JSON"),
    "config": (lambda m: (m / "config.json").write_text("["), "config.json is no valid JSON"),
    "no config": (lambda m: (m / "config.json").unlink(), "it has no config.json, so it is no model"),
    "cut": (lambda m: os.truncate(m / "model.safetensors", 90000), "model.safetensors is cut off"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_would_stop_a_start_is_a_mistake_also_for_serve(llama: Path, mistake, kind: str):
    break_it, said = BROKEN[kind]
    break_it(llama)
    assert said in mistake(llama, "--max-model-len", "8192", gpu="H100")
    with pytest.raises(ConfigError) as raised:
        precheck._refuse_certain(make_plan(Arguments(sources=(str(llama),))))
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--max-model-len 200k",
            "--max-model-len: 200000 is above the model's 131,072 (max_position_embeddings",
        ),
        (
            "-tp 5",
            "8 of the KV cache, cannot be split over 5 GPUs. Give one of 1, 2, 4, 8, 16, 32",
        ),
        ("-pp 40", "--pipeline-parallel-size: the model has only 32 layers. Give at most that."),
        ("--max-model-len=x", "--max-model-len is 'x'; must be a number, such as 8192."),
        ("--max-modl-len 8", "unknown flag '--max-modl-len'; did you mean '--max-model-len'?"),
        ("--chat-template no.jinja", "--chat-template: there is no file 'no.jinja'."),
        ("--tokenizer ./no", "--tokenizer: there is no folder './no'. Correct it, or give a hub id."),
        ("-tp -2", "--tensor-parallel-size: -2 is not possible. Give at least 1."),
        ("--max-num-seqs 0", "--max-num-seqs: 0 is not possible. Give at least 1."),
        ("--gpu-memory-utilization 1.5", "--gpu-memory-utilization: 1.5 is not possible. Give a share"),
        (
            "--dtype bflot16",
            "--dtype: 'bflot16' is not known. Did you mean 'bfloat16'? There are: auto, half,",
        ),
        ("--quantization fp9", "--quantization: 'fp9' is not known. Did you mean 'fp8'? There are: "),
    ],
)
def test_what_vllm_would_refuse_is_a_mistake(llama: Path, mistake, words: str, said: str):
    assert said in mistake(llama, *words.split(), gpu="B300:64")


def test_a_template_that_wants_more_than_a_question_is_served(llama: Path, mistake):
    (llama / "chat_template.jinja").write_text("{{ raise_exception('never') }}")
    assert (
        "does not render a chat: TemplateError: never. Correct it, or give another (`--chat-template FILE`)"
    ) in mistake(llama, "--max-model-len", "8192", gpu="H100")
    precheck._refuse_certain(make_plan(Arguments(sources=(str(llama),))))


def test_all_mistakes_come_at_once(llama: Path, checked):
    (llama / "tokenizer.json").unlink()
    (llama / "chat_template.jinja").write_text("{%")
    code, found = checked(llama, "--max-model-len", "1M", "-tp", "7", gpu="L4:6")
    assert (code, len(found["mistakes"])) == (2, 5), found["mistakes"]


def test_templates_of_today_render(llama: Path, checked):
    """With the tags, filters and functions that Transformers adds, and contents as lists."""
    (llama / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for message in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
        "{% for part in message.content %}{{ part['text'] | tojson(indent=4) }}{% endfor %}"
        "{% generation %}{{ strftime_now('%Y') }}{% endgeneration %}{% endfor %}"
    )
    assert checked(llama, "--max-model-len", "8192", gpu="L4")[0] == 0


def test_a_model_without_a_template_is_no_mistake(llama: Path, checked):
    (llama / "tokenizer_config.json").write_text("{}")
    code, found = checked(llama, gpu="H100")
    assert code == 0
    said = "llama: it has no chat template: chat requests are refused. `--chat-template FILE` gives one."
    assert found["not_checked"] == [said]


def test_a_misspelt_folder_is_named_with_its_neighbour(llama: Path, mistake):
    assert f"Did you mean '{llama}'?" in mistake(str(llama).replace("llama", "lama"))
    assert f"Did you mean {llama}?" in mistake(llama.parent)


@pytest.mark.parametrize(("reads", "name"), [("read_bytes", "config.json"), ("iterdir", "llama")])
def test_what_this_user_may_not_read_is_named(
    llama: Path, mistake, monkeypatch: pytest.MonkeyPatch, reads: str, name: str
):
    read = getattr(Path, reads)

    def refused(path: Path) -> Any:
        if path.name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return read(path)

    monkeypatch.setattr(Path, reads, refused)
    assert f"{name} cannot be read: Permission denied" in mistake(llama).replace("'", "")


def test_adapters_that_the_model_cannot_take_are_named(llama: Path, checked, tmp_path: Path):
    for name, rank, rows in (("good", 8, 4096), ("high", 64, 4096), ("other", 8, 2048)):
        folder = tmp_path / "adapters" / name
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
        layer = "base_model.model.model.layers.0.self_attn.q_proj"
        shapes = {f"{layer}.lora_A.weight": (rank, 4096), f"{layer}.lora_B.weight": (rows, rank)}
        write_safetensors(folder / "adapter_model.safetensors", shapes)
    lora = f"{{dynamic_lora_loading_path: {tmp_path / 'adapters'}, max_num_adapters_per_replica: 2}}"
    file, source = tmp_path / "m.yaml", f"{{model_id: m, model_source: {llama}}}"
    file.write_text(f"model_loading_config: {source}\nlora_config: {lora}\n")
    _, found = checked(file, gpu="H100")
    high, other = found["mistakes"]
    assert "its rank is 64, and this model takes at most 32; raise `max_lora_rank`" in high
    assert "it was made for another model: its change of model.layers.0.self_attn.q_proj is for" in other
    assert found["adapters_bytes"] > 0


def test_it_imports_no_engine(llama: Path):
    """A process of its own: what other tests have imported is in this one."""
    code = (
        "import sys; from penstock.cli.models.check import check; "
        f"code = check([{str(llama)!r}], ['--max-model-len', '8192'], gpu='L4'); "
        "print(code, [name for name in ('torch', 'vllm', 'transformers', 'ray') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize(
    "odd",
    [
        {"num_attention_heads": None},
        {"num_attention_heads": 0},
        {"num_attention_heads": -2},
        {"hidden_size": 0},
        {"hidden_size": "many"},
        {"head_dim": [64]},
        {"num_hidden_layers": 0},
        {"vocab_size": 10**400},
        {"quantization_config": ["fp8"]},
        {"rope_parameters": 5},
        {"max_position_embeddings": -1},
    ],
    ids=str,
)
def test_a_config_that_makes_no_sense_here_ends_nothing(llama: Path, checked, odd: dict[str, Any]):
    change(llama / "config.json", **odd)
    for gpu in ("L4", None):
        code, _ = checked(llama, gpu=gpu)
        assert code in (0, 2)
    with suppress(ConfigError):
        precheck._refuse_certain(make_plan(Arguments(sources=(str(llama),))))


def test_what_was_found_stands_beside_what_is_not_understood(llama: Path, checked):
    (llama / "tokenizer.json").unlink()
    change(llama / "config.json", quantization_config=["fp8"])
    code, found = checked(llama, gpu="L4")
    assert code == 2
    assert "there is no tokenizer" in found["mistakes"][0]
    assert "its config.json is not understood here" in found["not_checked"][-1]


def test_weights_that_are_not_there_are_a_mistake(llama: Path, mistake):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-2.safetensors is not there, which model.safetensors.index.json" in mistake(
        llama, gpu="H100"
    )
    for file in llama.glob("model*"):
        file.unlink()
    assert "there are no weights. Copy or download them" in mistake(llama, gpu="H100")


def test_a_length_is_free_where_config_json_names_none(llama: Path):
    config = json.loads((llama / "config.json").read_text())
    del config["max_position_embeddings"]
    (llama / "config.json").write_text(json.dumps(config))
    words = ("--max-model-len", "8192")
    precheck._refuse_certain(make_plan(Arguments(sources=(str(llama),), engine_words=words)))
