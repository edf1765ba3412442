"""The user's own code: how it is found, called, and what its return value means. No serving here."""

import asyncio
import threading

import pytest

from penstock.config import LLMConfig
from penstock.errors import BadRequest, ConfigError, Error, PromptTooLong
from penstock.hooks import Context
from penstock.hooks.hook import PREPROCESSOR, Hook, problems
from penstock.hooks.result import meant

pytestmark = pytest.mark.parity("X13")

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def config(**values) -> LLMConfig:
    return LLMConfig(model_loading_config={"model_id": "m"}, **values)


async def ask(preprocessor, value=CHAT, **values):
    chosen = config(preprocessor=preprocessor, **values)
    return await Hook(chosen, PREPROCESSOR)(value, Context(chosen, "/v1/chat/completions"))


class Greeter:
    def __init__(self, greeting: str = "hi", llm_config: LLMConfig | None = None) -> None:
        self.greeting = greeting
        self.llm_config = llm_config

    def __call__(self, request, context):
        return {**request, "greeting": self.greeting, "for": self.llm_config.model_id, "path": context.path}


async def greet_later(request):
    await asyncio.sleep(0)
    return {**request, "greeting": "later"}


async def test_a_class_is_made_with_its_arguments_and_the_config():
    answer = await ask(Greeter, preprocessor_options={"arguments": {"greeting": "ahoy"}})
    assert (answer["greeting"], answer["for"], answer["path"]) == ("ahoy", "m", "/v1/chat/completions")


async def test_an_import_path_and_a_coroutine_are_as_good():
    assert (await ask("copy:copy")) == CHAT
    assert (await ask(greet_later))["greeting"] == "later"


async def test_a_plain_function_leaves_the_event_loop_alone():
    assert (await ask(lambda request: threading.get_ident())) != threading.get_ident()


async def test_a_value_error_is_the_clients_fault_in_its_own_words():
    def refuse(request):
        raise ValueError("Give at most 3 pictures.")

    with pytest.raises(BadRequest, match="Give at most 3 pictures"):
        await ask(refuse)


async def test_other_errors_tell_nothing_of_what_is_inside(caplog):
    def fail(request):
        raise KeyError("secret")

    with pytest.raises(Error) as caught:
        await ask(fail)
    assert caught.value.status == 500
    assert "secret" not in str(caught.value)
    assert "secret" in caplog.text


async def test_our_own_errors_pass_as_they_are():
    def refuse(request):
        raise PromptTooLong("Too long.")

    with pytest.raises(PromptTooLong):
        await ask(refuse)


@pytest.mark.parametrize(
    ("named", "says"),
    [("no_such_module:Name", "no_such_module"), ("copy:nothing", "nothing"), (Greeter, "unexpected keyword")],
)
def test_what_cannot_be_made_is_a_config_error_with_its_place(named, says):
    wrong = config(preprocessor=named, preprocessor_options={"arguments": {"greating": "hi"}})
    with pytest.raises(ConfigError, match=says) as caught:
        Hook(wrong, PREPROCESSOR)
    assert "preprocessor" in str(caught.value)


def test_a_path_that_leads_nowhere_is_found_before_anything_starts():
    assert "no_such_module" in problems(config(preprocessor="no_such_module:Name"))[0]
    assert problems(config(preprocessor="copy:copy")) == []


def yields(request):
    yield request


async def yields_later(request):
    yield request


class Silent:
    pass


class Yielding:
    async def __call__(self, request):
        yield request


@pytest.mark.parametrize(
    ("named", "says"),
    [
        (yields, "it yields"),
        (yields_later, "it yields"),
        (Yielding, "it yields"),
        (Silent, "__call__"),
        (lambda: None, "request, context"),
        (lambda request, context, third: None, "request, context"),
        ("os:sep", "not callable"),
    ],
)
def test_what_cannot_be_called_with_a_request_is_found_before_anything_starts(named, says):
    assert says in problems(config(preprocessor=named))[0]
    with pytest.raises(ConfigError, match="model 'm'"):
        Hook(config(preprocessor=named), PREPROCESSOR)


def test_wrong_arguments_of_a_class_are_found_without_making_it():
    wrong = config(preprocessor=Greeter, preprocessor_options={"arguments": {"greating": "hi"}})
    assert "greating" in problems(wrong)[0]


def test_faulty_options_are_told_by_name():
    with pytest.raises(ConfigError, match="did you mean 'num_replicas'"):
        config(preprocessor="a:B", preprocessor_options={"num_replica": 2})
    with pytest.raises(ConfigError, match="no preprocessor"):
        config(preprocessor_options={"num_replicas": 2})
    with pytest.raises(ConfigError, match="import path"):
        config(preprocessor="just words")


# -- what a return value means


def test_a_request_goes_on_as_the_request():
    edited = {**CHAT, "temperature": 0}
    assert meant(edited, CHAT).request == edited
    assert meant(edited, CHAT).prompt is None


def test_an_engine_prompt_is_told_by_its_keys():
    prompt = {"prompt": "Hello", "multi_modal_data": {"image": object()}, "mm_processor_kwargs": {"fps": 2.0}}
    found = meant(prompt, CHAT)
    assert found.prompt is prompt
    assert found.request == CHAT
    assert meant({"prompt_token_ids": [1, 2]}, CHAT).prompt == {"prompt_token_ids": [1, 2]}


def test_a_completion_request_is_not_taken_for_an_engine_prompt():
    request = {"model": "m", "prompt": "Hello", "max_tokens": 3}
    assert meant({**request, "prompt": "Hello!"}, request).prompt is None


def test_sampling_parameters_come_beside_an_engine_prompt():
    found = meant(({"prompt": "Hello"}, {"temperature": 0}), CHAT)
    assert found.prompt == {"prompt": "Hello"}
    assert found.sampling == {"temperature": 0}


@pytest.mark.parametrize(
    "returned",
    [
        None,
        "text",
        {},
        {"prompt": "x", "multi_modal_dat": {}},
        {"model": "m", "prompt": "x", "multi_modal_data": {}},
        ({"messages": []}, {}),
        ({"prompt": "x"}, 3),
        ({"prompt": "x"}, {"temprature": 1}),
        {"prompt": 5},
        {"prompt_token_ids": "abc"},
        {"prompt_token_ids": [[1, 2]]},
        {"prompt_token_ids": [1.5]},
    ],
)
def test_anything_else_is_refused_with_what_is_allowed(returned):
    with pytest.raises(TypeError, match="engine prompt"):
        meant(returned, CHAT)


def test_a_misspelt_sampling_parameter_and_a_prompt_of_another_type_are_named():
    for engine in ("vllm", "sglang"):
        with pytest.raises(TypeError, match="'temprature', which is not known: did it mean 'temperature'"):
            meant(({"prompt": "x"}, {"temprature": 1}), CHAT, engine=engine)
    with pytest.raises(TypeError, match="a 'prompt' of type int"):
        meant({"prompt": 5}, CHAT)


def test_a_parameter_that_nobody_knows_passes_to_servers_of_other_projects_only():
    own = {"engines_own": 1}
    for engine in ("sglang", "process"):
        assert meant(({"prompt": "x"}, own), CHAT, engine=engine).sampling == own
    for engine in ("vllm", "sim"):
        with pytest.raises(TypeError, match="'engines_own', which is not known"):
            meant(({"prompt": "x"}, own), CHAT, engine=engine)
