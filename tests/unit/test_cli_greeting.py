import ast
import json
import shlex

import pytest

from penstock.cli.serve.greeting import greeting
from penstock.config import GatewayConfig, LLMConfig


def config(model_id: str = "demo", **kwargs: object) -> LLMConfig:
    return LLMConfig(model_loading_config={"model_id": model_id}, engine_kwargs=kwargs)


def parts(gateway: GatewayConfig, *configs: LLMConfig) -> tuple[list[str], str]:
    """The words of the curl line, and the Python program."""
    _, curl, rest = greeting(gateway, configs, seconds=12.34).split("\n\n", 2)
    return shlex.split(curl), rest.rpartition("\n\n")[0]


def test_curl_line_is_one_line_of_words_for_the_shell():
    words, _ = parts(GatewayConfig(port=9000), config('it\'s "a" model'))
    assert words[:2] == ["curl", "http://127.0.0.1:9000/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == 'it\'s "a" model'


def test_key_is_named_and_never_shown():
    text = greeting(GatewayConfig(port=9000, api_key="hush"), [config()], seconds=1)
    assert "hush" not in text
    assert "Bearer $PENSTOCK_API_KEY" in text
    assert 'os.environ["PENSTOCK_API_KEY"]' in text


def test_the_variable_that_holds_the_key_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    text = greeting(GatewayConfig(port=9000), [config()], seconds=1)
    assert "Bearer $VLLM_API_KEY" in text
    assert 'os.environ["VLLM_API_KEY"]' in text


def test_with_keys_of_tenants_alone_it_says_where_they_come_from():
    text = greeting(GatewayConfig(port=8000, keys_file="/keys.yaml"), [config()], seconds=1)
    assert "keys create" in text
    assert text.index("export PENSTOCK_API_KEY=KEY") < text.index("Bearer $PENSTOCK_API_KEY")


@pytest.mark.parametrize("kwargs", [{}, {"runner": "pooling"}])
@pytest.mark.parametrize("api_key", [None, "hush"])
def test_snippet_is_python(kwargs: dict[str, str], api_key: str | None):
    _, program = parts(GatewayConfig(port=9000, api_key=api_key), config('a "quoted" id', **kwargs))
    assert ast.parse(program)


def test_pooling_model_is_asked_for_embeddings():
    words, program = parts(GatewayConfig(port=9000), config(runner="pooling"))
    assert words[1].endswith("/v1/embeddings")
    assert "client.embeddings.create" in program


def test_all_models_and_the_seconds_are_named():
    text = greeting(GatewayConfig(port=8000), [config("a"), config("b")], seconds=12.34)
    assert text.startswith("Serving a, b at http://127.0.0.1:8000 after 12.3 s.")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("gpu-box", "http://gpu-box:8000"),
    ],
)
def test_address_is_one_that_this_machine_reaches(host: str, url: str):
    assert GatewayConfig(host=host, port=8000).local_url == url


def test_open_network_is_said():
    assert "every network" in greeting(GatewayConfig(host="0.0.0.0", port=8000), [config()], seconds=1)
