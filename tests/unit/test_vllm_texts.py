"""Texts that vLLM tokenizes are cut to what can matter, and requests take turns at it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.base import _SwappableExecutor
from vllm.renderers.params import TokenizeParams
from vllm.tokenizers.hf import CachedHfTokenizer, maybe_make_thread_pool

import penstock
from penstock.engines.vllm import errors
from penstock.engines.vllm.tokenizing import texts, turns
from penstock.errors import Unavailable

WINDOW = 2048
WORDS = " ".join(f"word{number}" for number in range(40_000))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return CachedHfTokenizer.from_pretrained(penstock.demo_model())


def params(**options: Any) -> TokenizeParams:
    return TokenizeParams(max_total_tokens=WINDOW, **options)


@pytest.mark.parametrize("tokens", [10, 2_000])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_truncated_text_is_cut_and_its_tokens_stay(tokenizer: Any, tokens: int, side: Any):
    truncated = params(truncate_prompt_tokens=tokens, truncation_side=side)
    left = texts.fit(WORDS, truncated, tokenizer)
    assert turns.LONG < len(left) < len(WORDS) / 4
    assert len(left) <= turns.LONG + tokens * tokenizer.max_chars_per_token
    whole, part = (tokenizer.encode(text) for text in (WORDS, left))
    kept = slice(-tokens, None) if side == "left" else slice(tokens)
    assert whole[kept] == part[kept]


def test_a_text_truncated_to_the_context_is_cut(tokenizer: Any):
    assert len(texts.fit(WORDS * 4, params(truncate_prompt_tokens=-1), tokenizer)) < len(WORDS)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_behind_many_blanks_is_kept(tokenizer: Any, side: Any):
    truncated = params(truncate_prompt_tokens=10, truncation_side=side)
    blanks = " \n" * turns.LONG
    text = WORDS + blanks if side == "left" else blanks + WORDS
    left = texts.fit(text, truncated, tokenizer)
    assert len(left) < len(text)
    assert left.split()[-10:] == WORDS.split()[-10:] if side == "left" else left.split()[0] == "word0"
    assert len(texts.fit(" " * 2 * texts.MOST_TEXT, truncated, tokenizer)) == texts.MOST_TEXT


def test_a_text_that_no_context_holds_is_refused(tokenizer: Any):
    with pytest.raises(
        VLLMValidationError, match=r"maximum context length is 2048 tokens.*1,048,576 are allowed"
    ):
        texts.fit("a" * (texts.MOST_TEXT + 1), params(), tokenizer)
    text = "a" * texts.MOST_TEXT
    assert texts.fit(text, params(), tokenizer) is text


class Queue:
    """An executor's side of a `FairQueue`: what it was given runs when the test says so."""

    def __init__(self) -> None:
        self._given: list[Any] = []
        self._fair = turns.FairQueue(self._given.append)
        self.ran: list[str] = []

    def ask(self, name: str, size: int, account: turns.Account | None = None) -> Future[Any]:
        turns.account.set(account)
        return self._fair.add(lambda: self.ran.append(name), size)

    def run(self) -> list[str]:
        while self._given:
            self._given.pop(0)()
        return self.ran


def test_a_request_of_one_text_does_not_wait_for_one_of_many():
    queue, many = Queue(), turns.Account()
    for number in range(100):
        queue.ask(f"many {number}", 10, many)
    queue.ask("one", 10)
    assert queue.run()[:3] == ["many 0", "one", "many 1"]


def test_a_request_of_many_texts_is_served_among_others():
    queue, many = Queue(), turns.Account()
    for number in range(3):
        queue.ask(f"many {number}", 10, many)
    queue.run()
    for number in range(3):
        queue.ask(f"other {number}", 10)
    queue.ask("many 3", 10, many)
    assert queue.run()[3:] == ["other 0", "other 1", "other 2", "many 3"]


def test_what_one_queue_has_served_does_not_count_in_another():
    first, second, of = Queue(), Queue(), turns.Account()
    first.ask("long", 1_000_000, of)
    second.ask("of the same request", 10, of)
    second.ask("other", 10)
    assert second.run() == ["of the same request", "other"]


def test_cancelled_work_does_not_run_and_a_failure_is_its_own():
    queue = Queue()
    queue.ask("cancelled", 1).cancel()
    failed = turns.FairQueue(lambda run: run()).add(lambda: 1 // 0, 1)
    assert queue.run() == []
    assert isinstance(failed.exception(), ZeroDivisionError)


def test_a_short_text_does_not_wait_for_a_long_one():
    executor, leave = _SwappableExecutor(1), threading.Event()
    turns.take_turns(executor, apart=True)
    long = executor.submit(lambda text: leave.wait(60), LONG)
    assert executor.submit(len, {"prompt": ["short"]}).result(60) == 1
    assert not long.done()
    leave.set()
    assert long.result(60)


LONG = "a" * (turns.LONG + 1)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("text", ["short", LONG])
def test_what_waits_behind_stuck_work_runs_in_the_replaced_threads(text: str, apart: bool):
    executor, stuck, leave = _SwappableExecutor(1), threading.Event(), threading.Event()
    turns.take_turns(executor, apart)

    def stay(text: str) -> bool:
        stuck.set()
        return leave.wait(60)

    first = executor.submit(stay, text)
    assert stuck.wait(60)
    gone, *waiting = [executor.submit(len, text) for _ in range(4)]
    gone.cancel()
    executor.replace_inner()
    assert [each.result(60) for each in waiting] == [len(text)] * 3
    assert executor.submit(len, text).result(60) == len(text)
    leave.set()
    assert first.result(60)


@pytest.mark.parametrize(
    ("pooled", "media", "runner", "apart"),
    [
        (True, None, "pooling", True),
        (True, "processor", "generate", True),
        (True, "processor", "pooling", False),  # its media are processed in the same thread
        (False, None, "generate", False),  # the tokenizer is not safe in two threads
    ],
)
def test_long_texts_have_a_thread_where_two_are_safe(
    monkeypatch: pytest.MonkeyPatch, pooled: bool, media: Any, runner: str, apart: bool
):
    monkeypatch.setattr(TokenizeParams, "apply_pre_tokenization", TokenizeParams.apply_pre_tokenization)
    tokenizer: Any = CachedHfTokenizer.from_pretrained(penstock.demo_model())
    renderer = SimpleNamespace(
        _executor=_SwappableExecutor(1),
        tokenizer=maybe_make_thread_pool(tokenizer) if pooled else tokenizer,
        mm_processor=media,
        model_config=SimpleNamespace(runner_type=runner),
    )
    texts.limit_texts(renderer)
    threads = [renderer._executor.submit(lambda _: threading.get_ident(), text) for text in ("", LONG)]
    assert (len({thread.result(60) for thread in threads}) == 2) is apart


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ("abc", 3),
        ([{"content": "abc"}, ("de", 7, None)], 5),
        ([1] * 50, 50),
        ({"prompts": {"prompt": "ab", "n": 3}}, 2),
    ],
)
def test_work_is_as_large_as_its_texts(values: Any, count: int):
    assert turns.characters(values) == count


def test_a_queue_that_took_too_long_is_busy_and_no_fault():
    said = "Chat template rendering timed out after 30.0s. This may indicate a malicious template."
    body = b'{"error":{"message":"' + said.encode() + b'","type":"InternalServerError"}}'
    for error in (errors.from_exception(TimeoutError(said)), errors.heard(body, 500)):
        assert isinstance(error, Unavailable)
        assert error.facts["retry_after_s"] > 0
