"""What stands between us and SGLang, without SGLang: command line, parameters, errors, metrics."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web

from penstock.config import LLMConfig
from penstock.engines.process.gauges import Gauges
from penstock.engines.process.readiness import NotReady
from penstock.engines.process.relay import ModelNames
from penstock.engines.process.wire import Wire
from penstock.engines.sglang import parameters, server
from penstock.engines.sglang.engine import SGLangEngine
from penstock.engines.sglang.flags import SGLangOptions, as_process, flags
from penstock.errors import BadRequest

pytestmark = pytest.mark.parity("S27")


def command(**engine_kwargs) -> list[str]:
    config = LLMConfig(
        model_loading_config={"model_id": "a:b", "model_source": "c"},
        llm_engine="SGLang",
        accelerator_config={"kind": "gpu"},
        engine_kwargs=engine_kwargs,
    )
    return as_process(config, SGLangOptions.model_validate(engine_kwargs)).engine_kwargs["command"]


def test_arguments_are_flags_in_sglangs_form():
    arguments = {
        "tp_size": 2,
        "enable_lora": True,
        "disable_radix_cache": False,
        "dllm_fdfo": False,
        "lora_paths": ["a=b", "c"],
        "json_model_override_args": {"a": 1},
        "chat_template": None,
    }
    assert list(flags(arguments)) == [
        "--tp-size=2",
        "--enable-lora",
        "--no-dllm-fdfo",
        "--lora-paths",
        "a=b",
        "c",
        '--json-model-override-args={"a": 1}',
    ]


def test_its_own_interpreter_runs_the_server_under_a_name_without_colons():
    words = command(python="/opt/sglang/bin/python", mem_fraction_static=0.5)
    assert words[:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    assert {"--model-path={model}", "--served-model-name=a-b", "--mem-fraction-static=0.5"} <= {*words}


def test_penstocks_interpreter_runs_it_where_none_is_named():
    assert command()[0] == "{python}"


def test_a_seed_is_kept_where_the_engine_obeys_it_and_all_of_top_k_has_sglangs_number():
    given = {"seed": 7, "top_k": 0, "stop": None}
    assert parameters.in_body(given, frozenset(given), seeds=True) == {"seed": 7, "top_k": -1}


def test_a_seed_is_left_out_where_nothing_is_drawn():
    given = {"seed": 7, "temperature": 0}
    assert parameters.in_body(given, frozenset(given), seeds=False) == {"temperature": 0}


@pytest.mark.parametrize(
    "arguments", [{"nnodes": 2}, {"dist_init_addr": "a:1"}, {"disaggregation_mode": "prefill"}]
)
def test_what_only_vllm_does_is_refused_before_the_start(arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=f"{name}: .* needs the engine 'vllm'"):
        SGLangOptions.model_validate(arguments)
    assert SGLangOptions.model_validate({"nnodes": 1, "disaggregation_mode": "null"})


async def test_weights_that_come_while_it_sleeps_are_loaded_when_it_wakes(tmp_path):
    engine = SGLangEngine(LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sglang"))
    engine._asleep = True
    await engine.update_weights(tmp_path, "2")
    assert engine.weights_version() == "2"
    ((path, value),) = engine._before()
    assert (path, value["model_path"]) == ("/update_weights_from_disk", str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(BadRequest, match="only a pointer of Git LFS"):
        await engine.update_weights(tmp_path, "3")


class SlowWire:
    """To a server that takes its time for the order of one path, and goes on when nobody waits for it."""

    def __init__(self, path: str) -> None:
        self.path, self.orders = path, list[str]()
        self.begun, self.done = asyncio.Event(), asyncio.Event()

    async def post(self, path: str, value: object) -> tuple[int, bytes]:
        self.orders.append(path)
        if path == self.path:
            self.begun.set()
            await self.done.wait()
        return 200, b""


async def given_up(path: str, operation: Callable[[SGLangEngine], Coroutine[Any, Any, None]]) -> SGLangEngine:
    """An engine whose operation is cancelled during this order, which is done nevertheless."""
    engine: Any = SGLangEngine(LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sglang"))
    engine._wire = wire = SlowWire(path)
    running = asyncio.create_task(operation(engine))
    await wire.begun.wait()
    running.cancel()
    asyncio.get_running_loop().call_soon(wire.done.set)
    with pytest.raises(asyncio.CancelledError):
        await running
    return engine


async def test_a_pause_whose_caller_gives_up_is_a_pause():
    engine = await given_up("/pause_generation", lambda engine: engine.pause("keep"))
    assert engine.is_paused()


async def test_new_weights_whose_caller_gives_up_have_their_version(tmp_path):
    path = "/update_weights_from_disk"
    engine: Any = await given_up(path, lambda engine: engine.update_weights(tmp_path, "2", "keep"))
    assert engine.weights_version() == "2"
    assert engine._wire.orders == ["/pause_generation", path, "/continue_generation"]


async def test_what_new_weights_pause_goes_on_where_the_caller_gives_up_before(tmp_path):
    engine: Any = await given_up("/pause_generation", lambda one: one.update_weights(tmp_path, "2", "keep"))
    assert engine._wire.orders[-1] == "/continue_generation"


def test_what_it_cannot_do_is_said_before_it_starts(caplog):
    with caplog.at_level("INFO", "penstock.engines.sglang.engine"):
        SGLangEngine(LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sglang"))
    assert "without enable_deterministic_inference refuses seeds" in caplog.text


def test_a_choice_is_a_regex_of_the_words_themselves():
    given = {"structured_outputs": {"choice": ["a.b", "c"]}}
    assert parameters.in_body(given, frozenset({"regex"}), seeds=False) == {"regex": r"a\.b|c"}


@pytest.mark.parametrize(
    "form", [{}, {"json": {}, "regex": "a"}, {"lark": "a"}, "json", {"structural_tag": "{"}]
)
def test_a_form_that_is_none_is_refused(form):
    with pytest.raises(BadRequest, match="structured"):
        parameters.in_body({"structured_outputs": form}, frozenset(), seeds=False)


def test_a_body_keeps_what_is_known_and_drops_what_has_no_effect():
    given = {"model": "m", "store": True, "stop": None, "include_stop_str_in_output": True}
    assert parameters.in_body(given, frozenset({"model", "no_stop_trim"}), seeds=False) == {
        "model": "m",
        "no_stop_trim": True,
    }


@pytest.mark.parametrize("name", ["best_of", "suffix", "parallel_tool_calls", "seed", "unheard_of"])
def test_what_would_be_ignored_is_refused(name):
    known = frozenset({"best_of", "suffix", "parallel_tool_calls", "seed"})
    with pytest.raises(BadRequest) as raised:
        parameters.in_body({name: False}, known, seeds=False)
    assert raised.value.facts == {"param": name}


def body(message: str) -> bytes:
    return msgspec.json.encode({"object": "error", "message": message, "code": 400})


def test_what_fits_no_form_is_told_without_files_and_values():
    said = (
        "2 validation errors:\n  {'type': 'x', 'loc': ('body', 'stop', 'list[str]'), 'msg': 'Input should be "
        "a list', 'input': 7}\n  {'type': 'x', 'loc': ('body', 'stop'), 'msg': \"It's wrong\"}\n\n"
        '  File "http_server.py", line 1'
    )
    error = server.heard(body(said), 400)
    assert str(error) == "stop: Input should be a list; stop: It's wrong."
    assert error.facts == {"param": "stop"}


def test_a_prompt_over_the_window_is_known_by_sglangs_words():
    said = "The input (9 tokens) is longer than the model's context length (8 tokens)."
    assert server.heard(body(said), 400).code == "context_length_exceeded"


def test_metrics_have_vllms_names_beside_sglangs():
    theirs = (
        'sglang:prompt_tokens_total{is_streaming="true",model_name="a-b"} 3.0\n'
        'sglang:prompt_tokens_total{is_streaming="false",model_name="a-b"} 4.0\n'
    )
    text = server.exposition(theirs, ModelNames("a:b", "a-b"), Gauges(2, 0))
    assert 'sglang:prompt_tokens_total{is_streaming="true",model_name="a:b"} 3.0' in text
    assert 'vllm:num_requests_running{model_name="a:b"} 2' in text
    assert 'vllm:prefix_cache_queries_total{model_name="a:b"} 7.0' in text
    assert 'vllm:prefix_cache_hits_total{model_name="a:b"} 0' in text


@asynccontextmanager
async def answering(body: bytes | None) -> AsyncGenerator[Wire]:
    """The wire to a server that answers all alike."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=404) if body is None else web.Response(body=body)

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    wire = Wire("127.0.0.1", runner.addresses[0][1], "key")
    yield wire
    await wire.close()
    await runner.cleanup()


@pytest.mark.parametrize(("found", "warns"), [("0.6.0", True), (server.KNOWN, False), (None, True)])
async def test_another_version_is_told_in_the_log(found: str | None, warns: bool, caplog):
    async with answering(None if found is None else msgspec.json.encode({"version": found})) as wire:
        await server.warn_of_another_version(wire)
    assert (f"SGLang is {found or 'of an unknown version'}" in caplog.text) == warns


@pytest.mark.parametrize("odd", [b"<html>", b"[]", b'{"loads": [{"num_running_reqs": null}]}'])
async def test_answers_of_another_form_say_nothing_of_version_and_load(odd: bytes, caplog):
    async with answering(odd) as wire:
        assert await server.load(wire) is None
        await server.warn_of_another_version(wire)
        with pytest.raises(NotReady, match=r"/openapi.json is of another form than SGLang"):
            await server.fields(wire)
    assert "SGLang is of an unknown version" in caplog.text
