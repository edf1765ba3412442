"""Engine arguments against vLLM's own classes and parser, in processes of their own, as in use.

Importing vLLM takes seconds, so each process is asked about all cases at once.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.config import LLMConfig, load_configs
from penstock.engines.check import check_arguments
from penstock.engines.vllm.arguments import names
from penstock.engines.vllm.arguments.check import parse_flags
from penstock.errors import ConfigError

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

SENTENCES = [  # one for each kind of fault
    (
        {"max_modl_len": 8192},
        "max_modl_len: unknown vLLM argument 'max_modl_len'; did you mean 'max_model_len'?",
    ),
    ({"max_model_len": "abc"}, "max_model_len: is the text 'abc'; must be a whole number, at least -1."),
    (
        {"dtype": "float17"},
        "dtype: is the text 'float17'; must be 'auto', 'half', 'float16', 'bfloat16', 'float' or 'float32'. "
        "Did you mean 'float16'?",
    ),
    ({"max_lora_rank": 7}, "max_lora_rank: is the number 7; must be 1, 8, 16"),
    (
        {"gpu_memory_utilization": 1.5},
        "gpu_memory_utilization: is the number 1.5; must be a number, above 0, at most 1.",
    ),
    (
        {"cudagraph_capture_sizes": [1, "2"]},
        "cudagraph_capture_sizes: is the list [1, '2']; must be a list, each entry a whole number.",
    ),
    ({"kv_transfer_config": 3}, "kv_transfer_config: is the number 3; must be a mapping."),
    (
        {"speculative_config": {"methd": "ngram"}},
        "speculative_config.methd: unknown key 'methd'; did you mean 'method'?",
    ),
    ({"kv_transfer_config": {"kv_connector": "X"}}, "kv_transfer_config: vLLM says: Please specify kv_role"),
    ({"model": "x"}, "model: is set by `model_loading_config.model_source`."),
    ({"port": 8000}, "port: is the gateway's"),
    ({"ssl_keyfile": "k"}, "ssl_keyfile: is the gateway's: set `gateway.tls`"),
    (
        {"data_parallel_size": 2, "data_parallel_rank": 1},
        "data_parallel_rank: is set for each replica of a gang: give data_parallel_size alone",
    ),
]

WRONG = [  # of the same kinds: what is wrong, by its path
    ({"max-model-len": 8192}, "max-model-len"),
    ({"max_model_len": "8192"}, "max_model_len"),
    ({"gpu_memory_utilization": "x"}, "gpu_memory_utilization"),
    ({"dtype": "AUTO"}, "dtype"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
    ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
    ({"attention_backend": "FLASH_ATN"}, "attention_backend"),
    ({"structured_outputs_config": {"backend": "nope"}}, "structured_outputs_config.backend"),
    ({"structured_outputs_config": {"backen": "auto"}}, "structured_outputs_config.backen"),
    (
        {"compilation_config": {"pass_config": {"fuse_normm": True}}},
        "compilation_config.pass_config.fuse_normm",
    ),
    ({"speculative_config": {"num_speculative_tokens": "4"}}, "speculative_config.num_speculative_tokens"),
    ({"tool_call_parser": 5}, "tool_call_parser"),
    ({"served_model_name": "x"}, "served_model_name"),
]

RIGHT = [
    {"max_model_len": None, "dtype": "bfloat16", "gpu_memory_utilization": 1, "quantization": "fp8"},
    {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}},
    {
        "kv_transfer_config": {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"a": 1},
        }
    },
    {"attention_backend": "flash_attn", "mamba_backend": "triton", "optimization_level": 2},
    {"limit_mm_per_prompt": {"image": 2}, "hf_overrides": {"a": 1}, "cpu_offload_params": ["a"]},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}},
    {"chat_template": "{{ messages }}", "enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
    {"lora_modules": [{"name": "a", "path": "/a"}], "logits_processors": [LLMConfig]},
    {
        "kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq"},
        "scheduling_policy": "priority",
    },
]

FLAGS = [
    (["--max-model-len", "8192"], {"max_model_len": 8192}),
    (
        ["--max-model-len", "8k", "--kv-cache-memory-bytes", "64M"],
        {"max_model_len": 8000, "kv_cache_memory_bytes": 64 << 20},
    ),
    (["-tp", "2", "--enable-prefix-caching"], {"tensor_parallel_size": 2, "enable_prefix_caching": True}),
    (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
    (["--max_num_seqs=4"], {"max_num_seqs": 4}),
    (["--seed", "0"], {}),
    (
        ["--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'],
        {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
    ),
    (
        ["--structured-outputs-config.backend", "xgrammar"],
        {"structured_outputs_config": {"backend": "xgrammar"}},
    ),
    (["--limit-mm-per-prompt.image", "2"], {"limit_mm_per_prompt": {"image": 2}}),
    (
        ["-O2", "--attention-backend", "FLASH_ATTN"],
        {"optimization_level": 2, "attention_backend": "FLASH_ATTN"},
    ),
    (
        ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
        {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"},
    ),
    (
        ["--chat-template", "t.jinja", "--reasoning-parser", "qwen3"],
        {"chat_template": "t.jinja", "reasoning_parser": "qwen3"},
    ),
    (["--hf-token"], {"hf_token": True}),
]

FLAG_SENTENCES = [  # one for each kind of fault
    (
        ["--max-model-lenn", "3", "--foo=3"],
        ["unknown flag '--max-model-lenn'; did you mean '--max-model-len'?", "unknown flag '--foo'"],
    ),
    (
        ["--max-model-len", "abc"],
        ["--max-model-len: is the text 'abc'; must be a whole number, at least -1."],
    ),
    (["--kv-transfer-config", "{bad"], ["--kv-transfer-config: is not valid JSON: "]),
    (
        ["--kv-transfer-config", '{"kv_rol": 1}'],
        ["--kv-transfer-config.kv_rol: unknown key 'kv_rol'; did you mean 'kv_role'?"],
    ),
    (["--max-num-seqs"], ["--max-num-seqs: expected one argument."]),
    (["--model", "x", "--port", "80"], ["--port: is the gateway's", "--model: is set by"]),
    (["--config", "missing.yaml"], ["--config: [Errno 2] No such file or directory: 'missing.yaml'."]),
    (["--headless"], ["--headless: belongs to vLLM's own launcher"]),
    (["stray"], ["unexpected argument 'stray'; flags start with --."]),
]

WRONG_FLAGS = [  # of the same kinds: the flag by its full name, and the value where there is one
    (["-tp", "x"], "--tensor-parallel-size: is the text 'x'"),
    (["--tensor-parallel-size", "0"], "--tensor-parallel-size: is the number 0"),
    (["--dtype", "float17"], "--dtype: is the text 'float17'"),
    (["--limit-mm-per-prompt.image"], "--limit-mm-per-prompt.image: "),
]

SPLIT = {
    "max_model_len": 64,
    "structured_outputs_config": {"backend": "xgrammar"},
    "kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
    "speculative_config": {"method": "ngram"},
    "cpu_offload_params": ["a"],
    "tool_call_parser": "hermes",
    "lora_modules": [{"name": "a", "path": "/a"}],
}

PARTED = """
applications:
- name: parted
  import_path: penstock.serve.builders:build_pd_openai_app
  args:
    prefill_config:
      model_loading_config: {model_id: m, model_source: demo}
      engine_kwargs: {max_num_seqz: 4}
    decode_config:
      model_loading_config: {model_id: m, model_source: demo}
"""

PROGRAM = """
import json, sys
from penstock.engines.vllm.arguments.schema import engine_arguments, frontend_arguments, split
from penstock.engines.vllm.arguments.respond import _Parser, cli_args, parse
from penstock.engines.vllm.arguments.refused import REFUSED
from penstock.errors import ConfigError
asked = json.load(sys.stdin)
engine, frontend = split(asked["split"])
try:
    split({"max_modl_len": 1, "model": "x"})
except ConfigError as error:
    refused = error.problems
names = [{name: type(value).__name__ for name, value in side.items()} for side in (engine, frontend)]
unknown = sorted(REFUSED.keys() - engine_arguments().keys() - frontend_arguments().keys())
parsed = [parse(argv) for argv in asked["argv"]]
said = {"parsed": parsed, "split": names, "refused": refused, "refused_but_unknown": unknown}
actions = cli_args.make_arg_parser(_Parser(add_help=False))._actions
print(json.dumps(said | {
    "flags": [flag for action in actions for flag in action.option_strings],
    "arguments": sorted(engine_arguments() | frontend_arguments()),
}))
"""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        # What vLLM knows of models' classes stays: it takes a process for each to find out.
        patch.setenv("VLLM_CACHE_ROOT", str(Path.home() / ".cache" / "vllm"))
        patch.setenv("XDG_CACHE_HOME", str(cache))
        yield cache


def config(engine_kwargs, model_id="m") -> LLMConfig:
    return LLMConfig(model_loading_config={"model_id": model_id}, engine_kwargs=engine_kwargs)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """A model, and one whose prompts are prefilled by replicas of their own, each with a fault."""
    one, parted = (tmp_path_factory.mktemp("config") / name for name in ("a.yaml", "pd.yaml"))
    one.write_text("model_loading_config: {model_id: a}\nengine_kwargs:\n  seed: 1\n  max_modl_len: 5\n")
    parted.write_text(PARTED)
    return one, parted


@pytest.fixture(scope="module")
def asked(files) -> list[LLMConfig]:
    """The n-th model has the n-th arguments; models of files are others."""
    kwargs = [*(kwargs for kwargs, _ in [*SENTENCES, *WRONG]), *RIGHT]
    prefill = {"engine_kwargs": {"max_num_seqz": 4}}
    inside = LLMConfig(model_loading_config={"model_id": "parted"}, prefill=prefill)
    models = [config(one, str(n)) for n, one in enumerate(kwargs)]
    return [*load_configs(files[0]), *load_configs(files[1]), inside, *models]


@pytest.fixture(scope="module")
def problems(asked) -> tuple[str, ...]:
    return check_arguments(asked).problems


@pytest.fixture(scope="module")
def vllm():
    """What the functions that import vLLM say, asked in one process."""
    argv = [argv for argv, _ in [*FLAGS, *FLAG_SENTENCES, *WRONG_FLAGS]]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps({"argv": argv, "split": SPLIT}),
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    answer["parsed"] = {json.dumps(one): said for one, said in zip(argv, answer["parsed"], strict=True)}
    return answer


def of(n: int, problems: tuple[str, ...]) -> list[str]:
    """What is said of the n-th model."""
    return [text for text in problems if text.startswith(f"model '{n}': ")]


@pytest.mark.parametrize("n", range(len(SENTENCES)))
def test_a_wrong_argument_is_told_with_what_is_allowed(problems, n: int):
    (said,) = of(n, problems)
    assert said.startswith(f"model '{n}': engine_kwargs.{SENTENCES[n][1]}")


def test_every_wrong_argument_is_told_by_its_path(problems):
    places = [text.split(": ")[1] for n in range(len(WRONG)) for text in of(len(SENTENCES) + n, problems)]
    assert places == [f"engine_kwargs.{path}" for _, path in WRONG]


def test_right_arguments_have_no_problems(problems):
    first = len(SENTENCES) + len(WRONG)
    assert [of(n, problems) for n in range(first, first + len(RIGHT))] == [[]] * len(RIGHT)


def test_what_vllm_refuses_is_refused_when_its_forms_are_kept(problems, asked):
    """With the first answer comes what numbers and names vLLM takes: nothing wrong may pass by it."""
    assert check_arguments(asked).problems == problems


def test_numbers_and_names_that_fit_are_not_asked_about_again(problems, own_cache):
    before = sorted(own_cache.rglob("*.json"))
    right = {"max_model_len": 77, "dtype": "half", "enable_lora": True, "limit_mm_per_prompt": {"image": 3}}
    assert check_arguments([config(right), config({"seed": 5, "tool_call_parser": "own"})]).problems == ()
    assert sorted(own_cache.rglob("*.json")) == before


def test_a_problem_names_file_and_line(problems, files):
    assert problems[0].startswith(f"{files[0]}:4: engine_kwargs.max_modl_len: unknown vLLM argument")


@pytest.mark.parity("S24", "S3")
def test_a_fault_of_the_prefill_half_is_told_with_its_place(problems):
    of_file, of_part = problems[1:3]
    assert "pd.yaml:8: applications[0].args.prefill_config.engine_kwargs.max_num_seqz" in of_file
    assert "prefill.engine_kwargs.max_num_seqz" in of_part


@pytest.mark.parametrize(("argv", "kwargs"), FLAGS)
def test_flags_of_vllm_serve_become_engine_kwargs(vllm, argv, kwargs):
    assert vllm["parsed"][json.dumps(argv)] == [kwargs, []]


@pytest.mark.parametrize(("argv", "told"), FLAG_SENTENCES)
def test_a_wrong_flag_is_told_with_what_is_allowed(vllm, argv, told):
    _, said = vllm["parsed"][json.dumps(argv)]
    assert [text[: len(start)] for text, start in zip(said, told, strict=True)] == told


def test_every_wrong_flag_is_told_by_its_full_name(vllm):
    for argv, start in WRONG_FLAGS:
        _, (said,) = vllm["parsed"][json.dumps(argv)]
        assert said.startswith(start)


def test_wrong_flags_are_one_error():
    with pytest.raises(ConfigError) as caught:
        parse_flags(["--max-model-lenn", "3"])
    assert len(caught.value.problems) == 1


def test_engine_and_frontend_get_their_own_arguments(vllm):
    engine, frontend = vllm["split"]
    assert set(frontend) == {"tool_call_parser", "lora_modules"}
    assert set(engine) == SPLIT.keys() - set(frontend)


def test_mappings_become_vllms_config_objects(vllm):
    engine, _ = vllm["split"]
    assert engine["structured_outputs_config"] == "StructuredOutputsConfig"
    assert engine["kv_transfer_config"] == "KVTransferConfig"


def test_what_vllm_wants_as_a_mapping_or_a_set_is_one(vllm):
    engine, _ = vllm["split"]
    assert (engine["speculative_config"], engine["cpu_offload_params"]) == ("dict", "set")


def test_splitting_refuses_what_checking_refuses(vllm):
    assert [problem.partition(": ")[0] for problem in vllm["refused"]] == [
        "engine_kwargs.max_modl_len",
        "engine_kwargs.model",
    ]


def test_every_refused_name_is_one_of_vllms(vllm):
    flags_only = ["api_server_count", "grpc", "headless"]
    assert vllm["refused_but_unknown"] == flags_only


def test_every_name_of_vllms_is_in_what_its_source_says(vllm):
    assert len(vllm["flags"]) > len(vllm["arguments"]) > 100
    assert names.unknown_flags(vllm["flags"]) == []
    assert set(vllm["arguments"]) <= names.known()
