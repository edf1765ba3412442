"""What a model's tokenizer and chat template must do, and what an engine must answer, before it is ready."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.tokenizers.hf import CachedHfTokenizer

import penstock
from penstock import asgi
from penstock.engines.vllm import endpoints
from penstock.engines.vllm.tokenizing.first_texts import check


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return CachedHfTokenizer.from_pretrained(penstock.demo_model())


def test_a_tokenizer_and_its_template_pass(tokenizer: Any):
    check(tokenizer, "folder", None)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path):
    shutil.copy(Path(penstock.demo_model()) / "config.json", tmp_path)
    mute: Any = CachedHfTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"the tokenizer in '{tmp_path}' has no vocabulary"):
        check(mute, str(tmp_path), None)


def test_a_tokenizer_of_another_alphabet_is_taken(caplog: pytest.LogCaptureFixture):
    """As of proteins."""
    letters = Tokenizer(models.BPE({letter: number for number, letter in enumerate("ACDFGIK")}, []))
    check(PreTrainedTokenizerFast(tokenizer_object=letters), "folder", None)
    assert "'folder' makes no tokens of the text 'Hello'" in caplog.text


def test_a_template_with_an_error_is_named_with_its_line(tokenizer: Any, tmp_path: Path):
    template = tmp_path / "bad.jinja"
    template.write_text("{{ messages }}\n{% if %}")
    with pytest.raises(ValueError, match=f"template in '{template}' has an error in line 2: Expected"):
        check(tokenizer, "folder", str(template))
    with pytest.raises(ValueError, match="template in 'chat_template' has an error in line 1"):
        check(tokenizer, "folder", "{% if %}")


def test_a_template_may_refuse_the_first_chat(tokenizer: Any):
    check(tokenizer, "folder", "{{ raise_exception('only for images') }}")


class App:
    """Answers each path with a status; says which were asked."""

    def __init__(self, statuses: dict[str, int]) -> None:
        self.statuses = statuses
        self.asked: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await asgi.read_body(receive)
        self.asked.append(scope["path"])
        response = JSONResponse({"error": {"message": "no"}}, self.statuses[scope["path"]])
        await response(scope, receive, send)


CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"


@pytest.mark.parametrize(
    ("statuses", "asked", "answered"),
    [
        ({CHAT: 200, COMPLETIONS: 200}, [CHAT], True),
        ({CHAT: 400, COMPLETIONS: 200}, [CHAT, COMPLETIONS], True),
        ({CHAT: 400, COMPLETIONS: 400}, [CHAT, COMPLETIONS], False),
        ({EMBEDDINGS: 200, "/v1/audio/transcriptions": 200}, [EMBEDDINGS], True),
        ({"/v1/audio/transcriptions": 200}, [], False),
    ],
)
async def test_the_first_endpoint_that_answers_is_enough(
    statuses: dict[str, int], asked: list[str], answered: bool
):
    app = App(statuses)
    assert await endpoints.is_answered(app, "m", set(statuses)) is answered
    assert app.asked == asked


async def test_a_model_that_only_a_plugin_knows_starts(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    assert await endpoints.is_answered(App({"/pooling": 500}), "m", {"/pooling"}) is False
    assert "/pooling refused the first request: no" in caplog.text


async def test_a_first_request_that_fails_ends_the_start():
    with pytest.raises(RuntimeError, match=f"first request to {CHAT} failed"):
        await endpoints.is_answered(App({CHAT: 500, COMPLETIONS: 200}), "m", {CHAT, COMPLETIONS})
