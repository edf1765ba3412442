"""A user's postprocessor: whole answers, and each event of a stream."""

import asyncio

import pytest
from recording import hooked
from served import chat, until

from penstock.config import LLMConfig
from penstock.hooks.hook import POSTPROCESSOR, Hook
from penstock.layers.postprocessing import Postprocessing

pytestmark = pytest.mark.parity("X13")


class Shout:
    """Loud text in both forms; notes of the preprocessor at the end."""

    def __call__(self, answer, context):
        for choice in answer["choices"]:
            part = choice.get("message") or choice.get("delta")
            part["content"] = part.get("content", "").upper()
        answer["said_by"] = context.notes.get("team", "nobody")
        return answer


def note(request, context):
    context.notes["team"] = "blue"
    return request


async def test_it_makes_whole_answers_and_finds_the_preprocessors_notes(served):
    async with hooked(served, preprocessor=note, postprocessor=Shout):
        answer = await served.http().post("/v1/chat/completions", json=chat("hello"))
        assert answer.json()["choices"][0]["message"]["content"] == "HELLO"
        assert answer.json()["said_by"] == "blue"


async def test_it_sees_each_event_of_a_stream(served):
    async with hooked(served, postprocessor=Shout):
        events = await served.openai().chat.completions.create(**chat("one two three"), stream=True)
        parts = [event async for event in events]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "ONE TWO THREE"
        assert len(parts) > 2


async def test_an_event_can_be_left_out_and_a_coroutine_will_do(served):
    async def without_b(event):
        return None if "b" in event["choices"][0]["delta"].get("content", "") else event

    async with hooked(served, postprocessor=without_b):
        events = await served.openai().chat.completions.create(**chat("a b c"), stream=True)
        text = "".join([event.choices[0].delta.content or "" async for event in events])
        assert text.split() == ["a", "c"]


async def test_errors_of_the_engine_pass_it_by(served):
    async with hooked(served, postprocessor=Shout):
        answer = await served.http().post("/v1/chat/completions", json=chat(max_tokens="many"))
        assert answer.status_code == 400


async def test_its_failure_is_500_before_the_first_byte(served):
    def fail(answer):
        raise ValueError("secret")

    async with hooked(served, postprocessor=fail):
        answer = await served.http().post("/v1/chat/completions", json=chat())
        assert answer.status_code == 500
        assert "The postprocessor of this model failed" in answer.text
        assert "secret" not in answer.text


async def test_its_failure_in_a_stream_is_the_last_event_and_ends_the_engines_work(served):
    seen = []

    def fail_late(event):
        seen.append(event)
        if len(seen) == 5:
            raise KeyError("secret")
        return event

    options = {"step_base_ms": 5.0}
    async with hooked(served, postprocessor=fail_late, engine_kwargs=options) as made:
        body = chat("one two three " + "more " * 500, stream=True)
        answer = await served.http().post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert '"code":"own_code_failed"' in answer.text
        assert "[DONE]" not in answer.text
        assert "secret" not in answer.text
        await until(lambda: made.engine.load().running == 0)


async def test_a_client_that_leaves_aborts_the_engines_request(served):
    async with hooked(served, postprocessor=Shout, engine_kwargs={"step_base_ms": 5.0}) as made:
        body = chat("word " * 500, stream=True)
        async with served.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_raw():
                break
        await until(lambda: made.engine.load().running == 0)


async def test_other_requests_go_on_while_it_works(served):
    began, go_on = asyncio.Event(), asyncio.Event()

    async def wait(answer):
        if "slow" in str(answer):
            began.set()
            await go_on.wait()
        return answer

    async with hooked(served, postprocessor=wait):
        slow = asyncio.create_task(served.openai().chat.completions.create(**chat("slow")))
        await began.wait()
        await served.openai().chat.completions.create(**chat("quick"))
        go_on.set()
        assert (await slow).choices[0].message.content == "slow"


async def test_what_is_no_answer_is_500_and_the_log_says_so(served, caplog):
    async with hooked(served, postprocessor=lambda answer: None):
        answer = await served.http().post("/v1/chat/completions", json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "own_code_failed")
        assert "returned nothing" in caplog.text


EVENTS = (
    b'event: message_start\ndata: {"type":"message_start"}\n\n'
    b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"gone"}}\n\n'
)


def stand_in(kind, body):
    async def app(scope, receive, send):
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def marked(answer):
    if answer.get("break"):
        raise KeyError("secret")
    return {**answer, "marked": True}


async def behind(served, kind, body):
    config = LLMConfig(model_loading_config={"model_id": "m"}, postprocessor=marked)
    await served.gateway("m")
    await served.app(Postprocessing(stand_in(kind, body), Hook(config, POSTPROCESSOR), config))


async def test_error_events_of_messages_pass_it_by(served):
    await behind(served, b"text/event-stream", EVENTS)
    text = (await served.http().post("/v1/messages", json=chat(stream=True))).text
    assert '"type":"message_start","marked":true' in text
    assert text.count("marked") == 1


async def test_it_breaks_a_stream_of_messages_off_in_anthropics_form(served):
    await behind(served, b"text/event-stream", b'event: ping\ndata: {"break":1}\n\n')
    text = (await served.http().post("/v1/messages", json=chat(stream=True))).text
    assert text.startswith('event: error\ndata: {"type":"error"')
    assert "secret" not in text


async def test_a_response_that_is_fetched_later_goes_through_it_again(served):
    await behind(served, b"application/json", b'{"id":"resp_1"}')
    assert (await served.http().get("/v1/responses/resp_1")).json() == {"id": "resp_1", "marked": True}
