"""The window over a backend that does what its rows say: answer, refuse, die, hang."""

import asyncio
import gc
from collections import Counter

import pytest
from interleaving import Start, disturbed
from interleaving import ended as how_it_ended
from tests.waiting import until

from penstock.data.backends.protocol import Response, RowInterrupted
from penstock.data.execution.retry import RetryPolicy
from penstock.data.execution.window import Window
from penstock.data.results.outcome import Outcome
from penstock.data.rows.request import RowRequest
from penstock.errors import EngineDead, EngineStartFailed, Unavailable
from penstock.transport.continuation import Made

QUICK = RetryPolicy(initial_backoff_s=0.001)
OVERLOADED = Response(429, b'{"error": {"message": "Full.", "code": "overloaded"}}')


class Obedient:
    """An engine with a batch of `size` rows; a row's body is what happens to it."""

    def __init__(self, size: int = 8, starts: int = 1_000) -> None:
        self.size, self.starts = size, starts
        self.inside: dict[asyncio.Future[None], str] = {}
        self.most = 0
        self.asked: Counter[str] = Counter()
        self.beside_poison: list[int] = []

    async def start(self, progress=None) -> None:
        await asyncio.sleep(0)
        self.starts -= 1
        if self.starts < 0:
            raise EngineStartFailed("No memory.")

    async def stop(self) -> None: ...

    async def send(self, request: RowRequest) -> Response:
        word = request.body.decode()
        self.asked[word] += 1
        death = asyncio.get_running_loop().create_future()
        self.inside[death] = word
        self.most = max(self.most, len(self.inside))
        try:
            return await self._answer(word, death)
        finally:
            del self.inside[death]

    async def _answer(self, word: str, death: asyncio.Future[None]) -> Response:
        if word.startswith("poison"):
            await asyncio.sleep(0)
            self.beside_poison.append(len(self.inside))
            for each in self.inside:
                each.done() or each.set_exception(EngineDead("It died."))
        if word == "hang" or word.startswith("poison"):
            await death
        done, _ = await asyncio.wait([death], timeout=0.001)
        if done:
            death.result()
        if word.startswith("busy") and self.asked[word] < int(word[4:]):
            return OVERLOADED
        if word == "broken":
            return Response(500, b'{"error": {"message": "Odd.", "code": "internal_error"}}')
        if word == "bad":
            return Response(400, b'{"error": {"message": "No such role.", "code": "invalid_request"}}')
        if word == "away" and self.asked[word] < 3:
            raise Unavailable("Nobody there.")
        return Response(200, b'{"said": "%s"}' % word.encode())

    def available_slots(self, in_flight: int) -> int:
        return max(0, self.size - in_flight)


def row(word: str) -> RowRequest:
    return RowRequest(path="/v1/completions", body=word.encode())


async def ended(backend: Obedient, *words: str, retry_policy: RetryPolicy = QUICK, alone: bool = True):
    window = Window(backend, retry_policy, exclusive=alone)
    return await asyncio.gather(*(window.run(row(word)) for word in words))


async def test_each_row_gets_its_own_answer():
    outcomes = await ended(Obedient(), *(f"row{n}" for n in range(100)))
    assert [bytes(outcome.body) for outcome in outcomes] == [b'{"said": "row%d"}' % n for n in range(100)]
    assert {outcome.state for outcome in outcomes} == {"ok"}


async def test_no_more_than_fit_are_in_the_engine_and_no_fewer():
    backend = Obedient(size=8)
    await ended(backend, *(f"row{n}" for n in range(100)))
    assert backend.most == 8


async def test_no_more_than_the_user_allows_are_in_the_engine():
    backend = Obedient(size=8)
    window = Window(backend, QUICK, max_in_flight=3)
    await asyncio.gather(*(window.run(row(f"row{n}")) for n in range(20)))
    assert backend.most == 3


async def test_a_row_goes_on_until_an_engine_fails_on_what_it_goes_on_with():
    given: list[Made | None] = []
    ends: list[Made | int] = [(b"o", b"1"), 429, (b"o", b"2"), 500, 200]

    class Scripted(Obedient):
        async def send(self, request: RowRequest) -> Response:
            given.append(request.made)
            end = ends[len(given) - 1]
            if isinstance(end, int):
                return Response(end, b"{}")
            death = RowInterrupted("It died.")
            death.made = end
            raise death

    outcome = await Window(Scripted(), QUICK).run(row("x"))
    assert (outcome.state, outcome.deaths) == ("ok", 2)
    assert given == [None, (b"o", b"1"), (b"o", b"1"), (b"o", b"2"), None]


async def test_a_long_row_does_not_hold_the_others():
    window = Window(Obedient(size=2), QUICK)
    long = asyncio.create_task(window.run(row("hang")))
    others = await asyncio.gather(*(window.run(row(f"row{n}")) for n in range(20)))
    assert [outcome.state for outcome in others] == ["ok"] * 20
    assert not long.done()
    long.cancel()


async def test_a_passing_refusal_is_asked_again():
    (outcome,) = await ended(Obedient(), "busy3")
    assert (outcome.state, outcome.attempts) == ("ok", 3)


async def test_a_refusal_that_does_not_pass_fails_the_row_after_its_attempts():
    (outcome,) = await ended(Obedient(), "broken")
    assert (outcome.state, outcome.attempts) == ("failed", 3)
    assert (outcome.failure.code, outcome.failure.status) == ("internal_error", 500)


async def test_who_is_asked_to_come_later_waits_without_using_up_attempts():
    (outcome,) = await ended(Obedient(), "busy9")
    assert (outcome.state, outcome.attempts) == ("ok", 9)


async def test_a_row_that_alone_is_put_off_for_too_long_fails():
    """As one that is larger than a service's limit of tokens a minute."""
    retry_policy = RetryPolicy(initial_backoff_s=0.001, outage_s=0.05)
    window = Window(Obedient(), retry_policy)
    late = asyncio.create_task(window.run(row("busy1000000")))
    while not late.done():
        assert (await window.run(row("row"))).state == "ok"
    outcome = await late
    assert (outcome.failure.code, outcome.failure.status) == ("overloaded", 429)


async def test_a_service_that_puts_everybody_off_for_too_long_ends_no_row():
    """As with a key whose budget is used up: rows stay, and can be asked when it is filled."""
    with pytest.raises(Unavailable, match=r"Every request was refused .* \(status 429\): Full\."):
        await ended(
            Obedient(), "busy1000000", retry_policy=RetryPolicy(initial_backoff_s=0.001, outage_s=0.05)
        )


async def test_an_engine_that_died_with_all_rows_cancelled_is_no_complaint(caplog):
    class Slow(Obedient):
        began, go, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def start(self, progress=None) -> None:
            self.began.set()
            await self.go.wait()
            self.ended.set()
            raise EngineStartFailed("No memory.")

    backend = Slow()
    held = asyncio.create_task(Window(backend, QUICK).run(row("poison")))
    await backend.began.wait()
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    backend.go.set()
    await backend.ended.wait()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_bad_row_fails_at_once_with_the_engines_words():
    backend = Obedient()
    (outcome,) = await ended(backend, "bad")
    assert (outcome.failure.message, outcome.failure.stage) == ("No such role.", "engine")
    assert backend.asked["bad"] == 1


async def test_who_is_not_reached_is_asked_again_without_using_up_attempts():
    (outcome,) = await ended(Obedient(), "away")
    assert (outcome.state, outcome.attempts) == ("ok", 1)


async def test_a_death_runs_again_only_what_was_in_flight():
    backend = Obedient(size=4)
    window = Window(backend, QUICK)
    before = await asyncio.gather(*(window.run(row(f"early{n}")) for n in range(10)))
    held = [asyncio.create_task(window.run(row(f"late{n}"))) for n in range(4)]
    await asyncio.sleep(0)
    for death in backend.inside:
        death.set_exception(EngineDead("Killed."))
    after = await asyncio.gather(*held)
    assert [outcome.deaths for outcome in before + after] == [0] * 10 + [1] * 4
    assert {backend.asked[f"early{n}"] for n in range(10)} == {1}


async def test_any_number_of_deaths_with_answers_between_them_is_borne():
    class Fragile(Obedient):
        async def _answer(self, word: str, death: asyncio.Future[None]) -> Response:
            if self.asked[word] == 1:
                raise EngineDead("Killed.")
            return await super()._answer(word, death)

    window = Window(Fragile(), QUICK)
    outcomes = [await window.run(row(f"row{n}")) for n in range(5 * QUICK.max_deaths)]
    assert {(outcome.state, outcome.deaths) for outcome in outcomes} == {("ok", 1)}


async def test_engines_that_die_together_are_no_rows_fault():
    class Node(Obedient):
        lost_at: float | None = None

        async def _answer(self, word: str, death: asyncio.Future[None]) -> Response:
            now = asyncio.get_running_loop().time()
            self.lost_at = self.lost_at or now
            if now < self.lost_at + 0.1:
                raise EngineDead("Its node is lost.")
            return await super()._answer(word, death)

    (outcome,) = await ended(Node(), "row", retry_policy=RetryPolicy(initial_backoff_s=0.1))
    assert (outcome.state, outcome.deaths) == ("ok", 2)


@pytest.mark.parametrize("words", [(), ("fine",)])
async def test_an_engine_that_dies_of_everything_is_given_up(words: tuple[str, ...]):
    class Broken(Obedient):
        async def _answer(self, word: str, death: asyncio.Future[None]) -> Response:
            return await super()._answer(word if word in words else "poison", death)

    backend = Broken(size=64)
    window = Window(backend, QUICK)
    assert [(await window.run(row(word))).state for word in words] == ["ok"] * len(words)
    results = await asyncio.gather(*(window.run(row(f"row{n}")) for n in range(64)), return_exceptions=True)
    poison = [result for result in results if isinstance(result, Outcome)]
    assert {type(result) for result in results} == {Outcome, EngineDead}
    assert {outcome.failure.code for outcome in poison} == {"poison_row"}
    assert len(poison) < 12
    assert 1_000 - backend.starts == 4 * QUICK.max_deaths


async def test_a_death_that_is_told_late_starts_no_second_engine():
    backend = Obedient(size=2)
    window = Window(backend, QUICK)
    rows = [asyncio.create_task(window.run(row(word))) for word in ("hang", "hang")]
    await asyncio.sleep(0)
    first, second = backend.inside
    first.set_exception(EngineDead("Killed."))
    await asyncio.sleep(0.01)
    assert backend.starts == 999
    second.set_exception(EngineDead("Killed."))
    await asyncio.sleep(0.01)
    assert backend.starts == 999
    for each in rows:
        each.cancel()


async def test_a_row_that_died_too_often_ends_once_an_engine_runs_again():
    class Slow(Obedient):
        running = True

        async def start(self, progress=None) -> None:
            self.running = False
            await asyncio.sleep(0.01)
            self.running = True

    backend = Slow()
    (outcome,) = await ended(backend, "poison")
    assert outcome.failure.code == "poison_row"
    assert backend.running


@pytest.mark.parity("D12")
async def test_a_poison_row_is_put_aside_and_all_others_are_answered():
    backend = Obedient(size=64)
    words = [f"row{n}" for n in range(200)]
    outcomes = await ended(backend, *words[:50], "poison", *words[50:])
    assert Counter(outcome.state for outcome in outcomes) == {"ok": 200, "failed": 1}
    assert outcomes[50].failure.code == "poison_row"
    assert outcomes[50].deaths == 3


async def test_a_suspect_runs_beside_ever_fewer_others_and_last_alone():
    backend = Obedient(size=64)
    await ended(backend, "poison", *(f"row{n}" for n in range(63)))
    assert backend.beside_poison[0] == 64
    assert 1 < backend.beside_poison[1] <= 8
    assert backend.beside_poison[2] == 1


async def test_of_three_poison_rows_each_is_found_and_no_other():
    words = [f"row{n}" for n in range(100)] + ["poison1", "poison2", "poison3"]
    outcomes = await ended(Obedient(size=32), *words)
    assert [outcome.state for outcome in outcomes] == ["ok"] * 100 + ["failed"] * 3


async def test_where_others_share_the_engines_the_rest_goes_on_beside_suspects():
    backend = Obedient(size=4)
    window = Window(backend, QUICK, exclusive=False)
    suspect = asyncio.create_task(window.run(row("hang"), deaths=2))
    others = await asyncio.gather(*(window.run(row(f"row{n}")) for n in range(10)))
    assert [outcome.state for outcome in others] == ["ok"] * 10
    suspect.cancel()


async def test_where_others_share_the_engines_suspects_run_a_few_at_a_time():
    backend = Obedient(size=64)
    window = Window(backend, QUICK, exclusive=False)
    await asyncio.gather(*(window.run(row(f"row{n}"), deaths=1) for n in range(64)))
    assert backend.most == QUICK.quarantine_concurrency(256, 1) == 16


async def test_where_others_share_the_engines_a_suspect_does_not_wait_for_the_rest():
    window = Window(Obedient(size=4), QUICK, exclusive=False)
    rest = [asyncio.create_task(window.run(row("hang"))) for _ in range(3)]
    await asyncio.sleep(0)
    assert (await asyncio.wait_for(window.run(row("row"), deaths=2), 10)).state == "ok"
    for each in rest:
        each.cancel()


async def test_deaths_elsewhere_count():
    backend = Obedient()
    window = Window(backend, QUICK)
    outcome = await window.run(row("poison"), deaths=2)
    assert (outcome.failure.code, outcome.deaths) == ("poison_row", 3)


async def test_an_engine_that_cannot_start_again_ends_every_row_of_the_window():
    backend = Obedient(size=2, starts=0)
    window = Window(backend, QUICK)
    rows = [asyncio.create_task(window.run(row(word))) for word in ("poison", "row", "later")]
    await asyncio.sleep(0)
    backend.size = 0
    results = await asyncio.gather(*rows, return_exceptions=True)
    assert [type(result) for result in results] == [EngineStartFailed] * 3
    with pytest.raises(EngineStartFailed):
        await window.run(row("row"))
    await asyncio.sleep(0.02)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_what_runs_when_the_engines_are_lost_ends_with_the_first_reason():
    backend = Obedient(size=2, starts=0)
    window = Window(backend, QUICK)
    rows = [asyncio.create_task(window.run(row("hang"))) for _ in range(2)]
    await asyncio.sleep(0)
    first, second = backend.inside
    first.set_exception(EngineDead("Killed."))
    await asyncio.wait(rows, return_when=asyncio.FIRST_COMPLETED)
    second.set_exception(EngineDead("Killed, too."))
    results = await asyncio.gather(*rows, return_exceptions=True)
    assert [str(result) for result in results] == ["No memory."] * 2
    assert backend.starts == -1


async def test_an_outage_whose_rows_were_cancelled_is_not_counted_on():
    class Away(Obedient):
        async def send(self, request: RowRequest) -> Response:
            self.asked["row"] += 1
            if self.asked["row"] < 3:
                raise Unavailable("Nobody there.")
            return Response(200, b"{}")

    backend, outage_s = Away(), 0.05
    window = Window(backend, RetryPolicy(initial_backoff_s=60, outage_s=outage_s))
    stopped = asyncio.create_task(window.run(row("row")))
    await until(lambda: backend.asked["row"])
    stopped.cancel()
    await asyncio.wait({stopped})
    await asyncio.sleep(2 * outage_s)
    window.retry_policy = RetryPolicy(initial_backoff_s=0.001, outage_s=outage_s)
    assert (await window.run(row("row"))).state == "ok"


async def test_an_outage_without_end_raises():
    class Gone(Obedient):
        async def send(self, request: RowRequest) -> Response:
            raise Unavailable("Nobody there.")

    with pytest.raises(Unavailable):
        await ended(Gone(), "row", "row2", retry_policy=RetryPolicy(initial_backoff_s=0.001, outage_s=0.01))


async def test_a_row_past_its_deadline_fails_and_leaves_the_engine():
    backend = Obedient()
    (outcome,) = await ended(backend, "hang", retry_policy=RetryPolicy(deadline_s=0.02))
    assert (outcome.state, outcome.failure.code) == ("failed", "deadline_exceeded")
    assert not backend.inside


async def test_waiting_for_a_turn_does_not_count_against_the_deadline():
    outcomes = await ended(
        Obedient(size=1), *["busy2"] * 3, retry_policy=RetryPolicy(initial_backoff_s=0.03, deadline_s=5)
    )
    assert {outcome.state for outcome in outcomes} == {"ok"}
    assert all(outcome.waited_s < 5 for outcome in outcomes)


async def test_a_cancelled_row_frees_its_place():
    backend = Obedient(size=1)
    window = Window(backend, QUICK)
    held, waiting = (asyncio.create_task(window.run(row("hang"))) for _ in range(2))
    last = asyncio.create_task(window.run(row("row")))
    await asyncio.sleep(0)
    waiting.cancel()
    held.cancel()
    assert (await last).state == "ok"
    assert window.in_flight == 0
    assert waiting.cancelled()
    assert backend.asked == {"hang": 1, "row": 1}


async def test_room_is_what_the_backend_has_less_those_that_wait():
    window = Window(Obedient(size=4), QUICK)
    assert window.available_slots() == 4
    rows = [asyncio.create_task(window.run(row("hang"))) for _ in range(6)]
    await asyncio.sleep(0)
    assert (window.in_flight, window.available_slots()) == (4, 0)
    for each in rows:
        each.cancel()
    await asyncio.wait(rows)
    assert window.available_slots() == 4


async def test_rows_that_wait_have_the_next_room():
    backend = Obedient(size=4)
    window = Window(backend, QUICK)
    rows = [asyncio.create_task(window.run(row("hang"))) for _ in range(6)]
    await asyncio.sleep(0)
    backend.size = 8
    assert window.available_slots() == 2
    for each in rows:
        each.cancel()


async def test_there_is_no_room_while_an_engine_starts_or_suspects_run_alone():
    class Slow(Obedient):
        async def start(self, progress=None) -> None:
            await asyncio.sleep(0.05)

    backend = Slow()
    window = Window(backend, QUICK, exclusive=False)
    hung = asyncio.create_task(window.run(row("hang")))
    await asyncio.sleep(0)
    next(iter(backend.inside)).set_exception(EngineDead("Killed."))
    await asyncio.sleep(0.01)
    assert (window.in_flight, window.available_slots()) == (0, 0)
    hung.cancel()
    window = Window(Obedient(), QUICK)
    suspect = asyncio.create_task(window.run(row("hang"), deaths=1))
    await asyncio.sleep(0)
    assert window.available_slots() == 0
    suspect.cancel()


async def test_room_that_an_engine_gets_by_itself_is_used():
    backend = Obedient(size=0)
    waits = asyncio.create_task(Window(backend, QUICK).run(row("row")))
    await asyncio.sleep(0.02)
    assert not backend.asked
    backend.size = 1
    assert (await asyncio.wait_for(waits, 10)).state == "ok"


async def test_who_pauses_before_another_try_holds_no_place():
    window = Window(Obedient(size=1), RetryPolicy(initial_backoff_s=60))
    pauses = asyncio.create_task(window.run(row("away")))
    await asyncio.sleep(0.02)
    assert (await asyncio.wait_for(window.run(row("row")), 10)).state == "ok"
    pauses.cancel()


async def test_an_answer_that_is_no_json_fails_the_row():
    class Babbling(Obedient):
        async def send(self, request: RowRequest) -> Response:
            return Response(200, b"<html>hello")

    (outcome,) = await ended(Babbling(), "row")
    assert (outcome.failure.code, outcome.state) == ("bad_answer", "failed")
    assert "<html>" in outcome.failure.message


@pytest.mark.parametrize(
    "body", [b'{"a": "x\ny"}', b'{"a": "\xff"}', b"[" * 100_000], ids=["control", "no UTF-8", "deep"]
)
@pytest.mark.parametrize("status", [200, 400])
async def test_an_answer_that_cannot_be_read_fails_its_row_alone(status: int, body: bytes):
    class Odd(Obedient):
        async def send(self, request: RowRequest) -> Response:
            return Response(status, body) if request.body == b"odd" else await super().send(request)

    odd, other = await ended(Odd(), "odd", "row")
    assert (odd.state, other.state) == ("failed", "ok")
    assert odd.failure.code == ("bad_answer" if status == 200 else "http_400")


class Refusing(Obedient):
    """A row `STATUS...` is refused so, with the rest as its message; `late` is answered when told."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.often = asyncio.Event(), asyncio.Event()

    async def _answer(self, word: str, death: asyncio.Future[None]) -> Response:
        if word == "late":
            await self.go.wait()
        if self.asked[word] > 2 * QUICK.max_attempts:
            self.often.set()
        if word[:3].isdigit():
            return Response(int(word[:3]), b'{"error": {"message": "%s"}}' % word[4:].encode())
        return await super()._answer(word, death)


@pytest.mark.parametrize("word", ["401 No such key.", "402 Pay first.", "404 The model `m` does not exist."])
async def test_what_is_refused_whatever_the_row_ends_the_job_and_fails_no_row(word: str):
    backend = Refusing()
    window = Window(backend, QUICK)
    late = asyncio.create_task(window.run(row("late")))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match=rf"status {word[:3]}\): {word[4:]} Put that right"):
        await window.run(row(word))
    with pytest.raises(Unavailable):
        await window.run(row("next"))
    assert backend.asked[word] == 1
    backend.go.set()
    assert (await late).state == "ok"


async def test_a_row_refused_by_itself_fails_alone():
    """As one that a firewall takes for an attack, or one that names a model that is not there."""
    window = Window(Refusing(), QUICK)
    others = [window.run(row(f"row{n}")) for n in range(20)]
    bad = [window.run(row(f"403 {n}")) for n in range(5)]
    own = RowRequest(path="/v1/completions", body=b"404 The model `x` does not exist.", model="x")
    outcomes = await asyncio.gather(*others, *bad, window.run(own))
    assert [outcome.state for outcome in outcomes] == ["ok"] * 20 + ["failed"] * 6


async def test_a_refused_row_fails_once_others_are_answered_though_some_are_always_in_flight():
    window = Window(Refusing(), QUICK)
    slow, bad = (asyncio.create_task(window.run(row(word))) for word in ("hang", "403 No."))
    async with asyncio.timeout(10):
        while not bad.done():
            assert (await window.run(row("row"))).state == "ok"
    assert (await bad).state == "failed"
    slow.cancel()


async def test_any_number_of_refused_rows_with_answers_between_them_fail_alone():
    window = Window(Refusing(), QUICK)
    for n in range(20):
        outcomes = await asyncio.gather(window.run(row(f"403 {n}")), window.run(row(f"row{n}")))
        assert [outcome.state for outcome in outcomes] == ["failed", "ok"]


async def test_rows_that_are_all_forbidden_wait_for_those_before_them_and_end_the_job():
    backend = Refusing()
    window = Window(backend, QUICK)
    late = asyncio.create_task(window.run(row("late")))
    await asyncio.sleep(0)
    rows = [asyncio.create_task(window.run(row(f"403 {n}"))) for n in range(20)]
    await asyncio.wait_for(backend.often.wait(), 10)
    assert not any(one.done() for one in rows)
    late.cancel()
    results = await asyncio.gather(*rows, return_exceptions=True)
    assert {type(result) for result in results} == {Unavailable}


@pytest.mark.parametrize("rows", [5, 15])
async def test_the_last_rows_do_not_wait_for_ever_to_be_told_apart(rows: int):
    outcomes = await ended(Refusing(), *(f"403 {n}" for n in range(rows)))
    assert {(outcome.state, outcome.attempts) for outcome in outcomes} == {("failed", 3)}


async def test_sixteen_refused_rows_without_an_answer_end_the_job_and_leave_nothing_running():
    window = Window(Refusing(), QUICK)
    results = await asyncio.gather(*(window.run(row(f"403 {n}")) for n in range(16)), return_exceptions=True)
    assert {type(result) for result in results} == {Unavailable}
    await asyncio.sleep(0.02)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_model_without_a_template_ends_the_job_with_what_to_do():
    window, refused = Window(Refusing(), QUICK), b"400 You must provide a chat template."
    with pytest.raises(
        Unavailable, match=r"status 400\): .* right \(--no-chat sends prompts as they are\) and"
    ):
        await window.run(RowRequest(path="/v1/chat/completions", body=refused))
    with pytest.raises(Unavailable, match="right and run"):
        await Window(Refusing(), QUICK).run(row("401 No such key."))


async def test_who_is_not_reached_is_asked_again_after_growing_pauses():
    asked: list[int] = []

    class Policy(RetryPolicy):
        def backoff_s(self, tries: int, requested_s: float | None = None) -> float:
            asked.append(tries)
            return 0.0 if tries < 4 else 3600.0

    class Gone(Obedient):
        async def send(self, request: RowRequest) -> Response:
            raise Unavailable("Nobody there.")

    asks = asyncio.create_task(Window(Gone(), Policy()).run(row("row")))
    await asyncio.sleep(0.02)
    assert asked == [1, 2, 3, 4]
    asks.cancel()


@pytest.mark.parametrize("deaths", [0, 1])
async def test_a_row_that_ends_lets_the_next_one_begin_at_once(deaths: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.data.execution.window._POLL_S", 60.0)
    backend = Obedient(size=1)
    window = Window(backend, QUICK)
    first = asyncio.create_task(window.run(row("row"), deaths))
    second = asyncio.create_task(window.run(row("hang")))
    await first
    await asyncio.sleep(0)
    assert backend.asked["hang"] == 1
    second.cancel()


async def test_a_deadline_is_over_all_tries_and_the_first_begins_the_wait():
    policy = RetryPolicy(initial_backoff_s=0.02, deadline_s=0.2)
    (late,) = await asyncio.wait_for(ended(Obedient(), "busy1000", retry_policy=policy), 10)
    assert (late.state, late.failure.code) == ("failed", "deadline_exceeded")
    (outcome,) = await ended(Obedient(), "busy3", retry_policy=RetryPolicy(initial_backoff_s=0.05))
    assert outcome.waited_s >= 0.025 + 0.05
    assert outcome.took_s < outcome.waited_s


async def test_a_pause_has_a_limit_after_any_number_of_tries():
    assert RetryPolicy(initial_backoff_s=1e-9).backoff_s(10_000) <= 30


@pytest.mark.parametrize("alone", [True, False])
def test_nothing_is_held_wherever_a_row_is_cancelled(alone: bool):
    async def rows(start: Start) -> None:
        backend = Obedient(size=2)
        window = Window(backend, QUICK, exclusive=alone)
        words = ("row1", "poison", "busy2", "away", "broken", "row2", "bad")
        tasks = [start(window.run(row(word))) for word in words]
        _, open_ = await asyncio.wait(tasks, timeout=10_000)
        assert not open_
        ends = dict(zip(words, map(how_it_ended(), tasks), strict=True))
        assert sum(isinstance(end, asyncio.CancelledError) for end in ends.values()) <= 1
        for word in ("row1", "row2", "busy2", "away"):
            assert isinstance(ends[word], asyncio.CancelledError) or ends[word].state == "ok"
        assert (window.in_flight, window.available_slots(), len(backend.inside)) == (0, 2, 0)
        assert (await asyncio.wait_for(window.run(row("last")), 1)).state == "ok"
        await asyncio.sleep(1)

    assert disturbed(rows) > 30
