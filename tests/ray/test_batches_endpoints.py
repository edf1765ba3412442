"""Each endpoint of a model that writes, asked by lines of batches; test_clients_pooling asks the others."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.demo_questions import QUESTIONS
from tests.ray.clients import WAYS, batch, config, served

pytestmark = [pytest.mark.full, pytest.mark.parity("X2")]

QUESTION = "What is Penstock?"
TURNS = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def url(serve_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    configs = [config("assistant", "assistant", reasoning_parser="qwen3")]
    with served("writing", configs, serve_url, tmp_path_factory.mktemp("jobs")) as urls:
        yield urls[WAYS[1]]


def _response(answer: Any) -> str:
    parts = [part for item in answer["output"] if item["type"] == "message" for part in item["content"]]
    return parts[-1]["text"]


def _message(answer: Any) -> str:
    return next(part["text"] for part in answer["content"] if part["type"] == "text")


@pytest.mark.parametrize(
    ("path", "body", "look", "expected"),
    [
        (
            "/v1/chat/completions",
            {"messages": TURNS},
            lambda answer: answer["choices"][0]["message"]["content"],
            QUESTIONS[QUESTION],
        ),
        ("/v1/completions", {"prompt": QUESTION}, lambda answer: answer["object"], "text_completion"),
        ("/v1/responses", {"input": QUESTION}, _response, QUESTIONS[QUESTION]),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 100}, _message, QUESTIONS[QUESTION]),
    ],
)
def test_every_endpoint_answers_lines_of_batches(
    url: str, path: str, body: dict[str, Any], look: Callable[[Any], str], expected: str
) -> None:
    answers = batch(url, path, [{"model": "assistant", "temperature": 0} | body] * 2)
    assert [look(answer) for answer in answers] == [expected, expected]
