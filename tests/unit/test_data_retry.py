"""What a response means for its row, and how long a row pauses before its next try."""

import pytest

from penstock.data.backends.protocol import Response
from penstock.data.execution import retry
from penstock.data.execution.retry import RetryPolicy
from penstock.data.rows.request import CHAT, RowRequest

CHAT_ROW = RowRequest(path=CHAT, body=b"{}")


def error(message: str = "Odd.", code: str = "odd") -> bytes:
    return b'{"error": {"message": "%b", "code": "%b", "type": "t"}}' % (message.encode(), code.encode())


@pytest.mark.parametrize(("tries", "longest_s"), [(1, 0.5), (2, 1.0), (4, 4.0), (7, 30.0), (10**6, 30.0)])
def test_pauses_double_up_to_a_limit_and_differ_by_up_to_a_half(tries: int, longest_s: float):
    pauses = [RetryPolicy().backoff_s(tries) for _ in range(300)]
    assert longest_s / 2 <= min(pauses) < 0.55 * longest_s
    assert 0.95 * longest_s < max(pauses) <= longest_s


@pytest.mark.parametrize(("requested_s", "pause_s"), [(0.0, 0.0), (7.0, 7.0), (10_000.0, 300.0)])
def test_a_service_says_itself_when_to_come_again(requested_s: float, pause_s: float):
    assert RetryPolicy().backoff_s(5, requested_s) == pause_s


def test_fewer_suspects_run_together_after_each_death_and_the_last_one_alone():
    policy = RetryPolicy(max_deaths=4)
    assert [policy.quarantine_concurrency(1_000, deaths) for deaths in range(5)] == [1_000, 100, 10, 1, 1]
    assert policy.quarantine_concurrency(0, 1) == 1
    assert RetryPolicy(max_deaths=3).quarantine_concurrency(10, 1) == 4


@pytest.mark.parametrize(
    ("status", "body", "again"),
    [
        (500, error(), True),
        (503, b"Busy", True),
        (408, b"", True),
        (400, error(), False),
        (501, error(), False),
        (500, error(code="own_code_failed"), False),
        (500, error("own_code_failed"), True),
    ],
)
def test_what_may_end_otherwise_is_tried_again(status: int, body: bytes, again: bool):
    assert retry.is_retryable(Response(status, body)) is again


@pytest.mark.parametrize(
    ("request_", "status", "body", "all_of_them"),
    [
        (CHAT_ROW, 401, b"", True),
        (CHAT_ROW, 403, b"", None),
        (RowRequest(path=CHAT, body=b"{}", model="own"), 401, b"", None),
        (RowRequest(path="https://other/v1", body=b"{}"), 401, b"", None),
        (CHAT_ROW, 404, error("No such model."), True),
        (CHAT_ROW, 404, error(code="model_not_found"), True),
        (CHAT_ROW, 404, error("No such file."), False),
        (RowRequest(path=CHAT, body=b"{}", model="own"), 404, error("No such model."), False),
        (CHAT_ROW, 400, error("You must provide a chat template."), True),
        (CHAT_ROW, 422, error("You must provide a chat template."), False),
        (RowRequest(path="/v1/completions", body=b"{}"), 400, error("must provide a chat template"), False),
        (CHAT_ROW, 400, error(), False),
        (CHAT_ROW, 200, b"{}", False),
    ],
)
def test_what_refuses_one_row_or_all(
    request_: RowRequest, status: int, body: bytes, all_of_them: bool | None
):
    assert retry.refuses_all(request_, Response(status, body)) is all_of_them


@pytest.mark.parametrize(
    ("status", "lasting"),
    [
        (400, True),
        (404, True),
        (422, True),
        (401, False),
        (429, False),
        (499, True),
        (500, False),
        (501, False),
    ],
)
def test_what_would_end_so_again(status: int, lasting: bool):
    assert retry.is_lasting(status) is lasting


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (error(), "odd", "Odd."),
        (b'{"error": {"type": "t", "message": "Odd."}}', "t", "Odd."),
        (b'{"error": {"code": 7, "type": "t", "message": "Odd."}}', "t", "Odd."),
        (b'{"error": {"code": 7, "message": "Odd."}}', "http_418", "Odd."),
        (b'{"error": "Odd."}', "http_418", "Odd."),
        (b'{"detail": "Odd."}', "http_418", "Odd."),
        (b"<html>", "http_418", "<html>"),
        (b"", "http_418", "Status 418."),
        (b"x" * 10_000, "http_418", "x" * 2_000),
    ],
)
def test_the_failure_says_what_the_body_says(body: bytes, code: str, message: str):
    failure = retry.response_failure(Response(418, body), attempts=2)
    assert (failure.code, failure.message, failure.status, failure.attempts) == (code, message, 418, 2)


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (b'{"error": {"type": "t"}}', True),
        (b'{"type":"error","error": {"type": "t"}}', True),
        (b'{"error": {"code": "c"}}', False),
        (b'{"detail": {"type": "t"}}', False),
        (b'{"error": {"type": "t", "message": "%b"}}' % (b"x" * (1 << 16)), False),
    ],
)
def test_an_error_in_a_known_form_is_kept_whole(body: bytes, kept: bool):
    outcome = retry.classify_response(Response(400, body), attempts=1)
    assert (bytes(outcome.body) == body) is kept
    assert outcome.state == "failed"


def test_an_answer_is_ok_with_its_body():
    outcome = retry.classify_response(Response(200, b'{"said": "so"}'), attempts=3)
    assert (outcome.state, bytes(outcome.body), outcome.attempts) == ("ok", b'{"said": "so"}', 3)
