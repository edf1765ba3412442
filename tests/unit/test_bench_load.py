"""What `penstock bench` asks, and when: lengths, texts, arrivals, traces, conversations."""

import json
import statistics
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.bench.load.arrivals import Level, arrivals
from penstock.bench.load.conversations import RequestFormat, RequestWriter, Workload
from penstock.bench.load.lengths import Length
from penstock.bench.load.target import Target
from penstock.bench.load.text import TWICE, TextSource, TokenScale, even_words
from penstock.bench.load.trace import read_trace
from penstock.bench.run.figures import SLO
from penstock.bench.run.settings import BenchOptions, BenchSettings
from penstock.errors import ConfigError


def drawn(text: str) -> list[int]:
    random, length = Random(1), Length.parse(text, "--input")
    return [length.draw(random) for _ in range(20_000)]


def work(**changes: Any) -> Workload:
    fixed: dict[str, Any] = {
        "form": RequestFormat("m"),
        "salt": "s",
        "input": Length.parse("40", ""),
        "output": Length.parse("8", ""),
    }
    return Workload(**{**fixed, **changes})


def bodies(writer: RequestWriter, index: int, *answers: str, level: int = 0) -> list[dict[str, Any]]:
    conversation = writer.conversation(index, level)
    asked = [next(conversation), *(conversation.send(answer) for answer in answers)]
    return [json.loads(request.body) for request in asked]


def test_one_number_is_always_that_length() -> None:
    assert set(drawn("512")) == {512}


def test_range_is_even_and_holds_both_ends() -> None:
    values = drawn("10-19")
    assert set(values) == set(range(10, 20))
    assert statistics.mean(values) == pytest.approx(14.5, rel=0.02)


@pytest.mark.parametrize("kind", ["normal", "lognormal"])
def test_distribution_has_its_mean_and_variation(kind: str) -> None:
    values = drawn(f"{kind}:500:0.2")
    assert statistics.mean(values) == pytest.approx(500, rel=0.02)
    assert statistics.stdev(values) == pytest.approx(100, rel=0.05)


def test_wide_distribution_never_gives_less_than_one_token() -> None:
    assert min(drawn("normal:3:2")) == 1


@pytest.mark.parametrize("text", ["", "0", "-3", "9-3", "many", "normal:5", "gamma:5:1", "1.5"])
def test_unreadable_length_names_its_option_and_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="--output"):
        Length.parse(text, "--output")


def test_texts_of_different_requests_share_no_beginning() -> None:
    text = TextSource("salt")
    beginnings = {text.cut(100, str(i))[:48] for i in range(500)}
    assert len(beginnings) == 500


def test_text_has_as_many_words_as_asked_however_many() -> None:
    text = TextSource("salt")
    assert [len(text.cut(words, "x").split()) for words in (1, 12, 13, 700, 300_000)] == [
        1,
        12,
        13,
        700,
        300_000,
    ]


def test_ruler_finds_tokens_of_a_word_and_of_the_template() -> None:
    scale = TokenScale.of((32, 32 * 2 + 9), (160, 160 * 2 + 9))
    assert (scale.tokens_per_word, scale.overhead, scale.exact) == (2.0, 9.0, True)
    assert scale.words(100) == 50


def tokens(text: str, small: int = 7) -> list[int]:
    """Of a small vocabulary: words have one to three tokens, every seventh one."""
    numbers = [int.from_bytes(word.encode()) for word in text.split()]
    return [number + part for number in numbers for part in range(1 + number % small % 3)]


@pytest.mark.parametrize("before", [[], [1]])
def test_texts_of_even_words_have_the_tokens_asked_for(before: list[int]) -> None:
    words = even_words(before + tokens(TWICE))
    assert len(words) > 8
    text = TextSource("salt", words)
    assert {len(tokens(text.cut(64, str(i)))) for i in range(50)} == {64}
    assert len({len(tokens(TextSource("salt").cut(64, str(i)))) for i in range(50)}) > 5


@pytest.mark.parametrize("unclear", [[], [1, 2, 3], tokens(TWICE) + [1], list(range(300))])
def test_tokens_that_show_no_words_give_none(unclear: list[int]) -> None:
    assert even_words(unclear) == ()


def test_every_run_has_new_texts_of_the_same_lengths() -> None:
    first, second = (
        bodies(RequestWriter(work(salt=salt, input=Length.parse("10-90", ""))), 3)[0]["messages"][0][
            "content"
        ]
        for salt in ("a", "b")
    )
    assert first != second
    assert len(first) == len(second)


def test_later_turns_hold_the_conversation_so_far() -> None:
    _, last = bodies(RequestWriter(work(turns=2)), 0, "the answer")
    assert [message["role"] for message in last["messages"]] == ["user", "assistant", "user"]
    assert last["messages"][1]["content"] == "the answer"


def test_completions_continue_their_own_text() -> None:
    first, last = bodies(RequestWriter(work(form=RequestFormat("m", chat=False), turns=2)), 0, " and so")
    assert last["prompt"].startswith(first["prompt"] + " and so ")


def test_conversations_share_their_prefix_only() -> None:
    writer = RequestWriter(work(shared_prefix=200))
    (one,), (other,) = bodies(writer, 0), bodies(writer, 1)
    assert one["messages"][0] == other["messages"][0]
    assert len(one["messages"][0]["content"].split()) == 200
    assert one["messages"][1] != other["messages"][1]


def test_every_level_has_prefixes_of_its_own() -> None:
    writer = RequestWriter(work(shared_prefix=200))
    (one,), (other,) = bodies(writer, 0, level=0), bodies(writer, 0, level=1)
    assert one["messages"][0] != other["messages"][0]


def test_there_are_as_many_prefixes_as_asked() -> None:
    writer = RequestWriter(work(shared_prefix=20, prefixes=3))
    assert len({bodies(writer, i)[0]["messages"][0]["content"] for i in range(50)}) == 3


def test_request_asks_for_usage_and_an_exact_length() -> None:
    (body,) = bodies(RequestWriter(work()), 0)
    assert body["stream_options"] == {"include_usage": True}
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (8, True, True)


def test_own_requests_keep_what_they_say_and_come_round_again() -> None:
    own = (b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}', b'{"messages": []}')
    writer = RequestWriter(
        work(bodies=own, output=None, form=RequestFormat("m", ignore_eos=False, more={"top_k": 1}))
    )
    (body,) = bodies(writer, 2)
    assert body["messages"][0]["content"] == "hi"
    assert (body["max_tokens"], body["model"], body["top_k"]) == (5, "m", 1)


def test_poisson_arrivals_have_the_rate_and_its_randomness() -> None:
    times = [begin.at_s for begin in islice(arrivals(Level(0, rate=50.0), 7, ()), 20_000)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.05)


def test_arrivals_are_the_same_in_every_worker_and_follow_the_seed() -> None:
    level = Level(0, rate=5.0, seconds=20.0)
    assert [*arrivals(level, 1, ())] == [*arrivals(level, 1, ())] != [*arrivals(level, 2, ())]


def test_arrivals_of_the_warmup_do_not_count() -> None:
    level = Level(0, rate=10.0, steady=True, warmup_s=2.0, seconds=3.0)
    found = [begin.counted for begin in arrivals(level, 0, ())]
    assert (found.count(False), found.count(True)) == (20, 30)


def test_arrivals_end_with_the_conversations() -> None:
    found = [begin.index for begin in arrivals(Level(0, rate=9.0, conversations=4), 0, ())]
    assert found == [0, 1, 2, 3]


MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 30535, "input_length": 700, "output_length": 26, "hash_ids": [46, 2353]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,230,1317,Conversation log
"""


@pytest.mark.parametrize(
    ("name", "text", "second", "lengths"),
    [
        ("mooncake.jsonl", MOONCAKE, 3.053, (700, 26)),
        ("azure.csv", AZURE, 0.052, (3180, 8)),
        ("burst.csv", BURST, 40.5, (1087, 230)),
    ],
)
def test_known_traces_are_read(
    tmp_path: Path, name: str, text: str, second: float, lengths: tuple[int, int]
) -> None:
    (tmp_path / name).write_text(text)
    first, last = read_trace(tmp_path / name)
    assert first.at_s == 0
    assert last.at_s == pytest.approx(second, abs=1e-6)
    assert (last.input_tokens, last.output_tokens) == lengths


def test_trace_can_be_played_faster(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(BURST)
    assert read_trace(tmp_path / "t.csv", speed=10)[-1].at_s == pytest.approx(4.05)


def test_prompts_of_a_trace_share_the_blocks_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(MOONCAKE)
    writer = RequestWriter(work(trace=read_trace(tmp_path / "t.jsonl")))
    (one,), (other,) = (bodies(writer, i) for i in (0, 1))
    texts = [body["messages"][0]["content"] for body in (one, other)]
    assert texts[0][: 4 * 512] == texts[1][: 4 * 512]
    assert texts[0][4 * 512 :] != texts[1][4 * 512 :]
    assert len(texts[1].split()) == 700


@pytest.mark.parametrize("text", ["", '{"timestamp": 1}', "no json", '{"timestamp": "when?"}'])
def test_trace_that_cannot_be_used_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=r"t\.jsonl"):
        read_trace(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://box/v1/", "http://box/v1"),
        ("https://host/api/v1/chat/completions", "https://host/api/v1"),
        ("http://[::1]:9/", "http://[::1]:9/v1"),
    ],
)
def test_url_is_taken_as_users_write_it(url: str, seen: str) -> None:
    assert Target.parse(url).url == seen


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        Target.parse(url)


def test_slo_is_read_with_units() -> None:
    slo = SLO.parse("ttft=200ms, itl=0.03s")
    assert dict(slo.limits) == pytest.approx({"ttft": 0.2, "itl": 0.03})


@pytest.mark.parametrize("text", ["ttft=200", "latency=1s", "ttft", "", "ttft=1s,,"])
def test_unreadable_slo_says_how_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError, match="ttft=200ms"):
        SLO.parse(text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": "4", "rate": "1"},
        {"concurrency": "0"},
        {"rate": "fast"},
        {"rate": "nan"},
        {"requests": 5, "conversations": 5},
        {"endpoint": "embeddings"},
        {"body": "[1]"},
        {"prompts": Path("/does/not/exist")},
        {"api_key": "a\nb"},
    ],
)
def test_contradictory_and_unreadable_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        BenchSettings.of(BenchOptions("http://host", **wrong))


def test_without_options_sixteen_users_ask_for_half_a_minute() -> None:
    (level,) = BenchSettings.of(BenchOptions("http://host")).levels
    assert (level.concurrency, level.seconds, level.warmup_s, level.conversations) == (16, 30.0, 3.0, None)


def test_requests_of_several_turns_become_conversations() -> None:
    (level,) = BenchSettings.of(BenchOptions("http://host", requests=10, turns=4)).levels
    assert (level.conversations, level.seconds) == (3, None)
