"""A replica is killed: out of the table, restarted by Serve, back without a new gateway."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

from tests.ray.front import Front
from tests.ray.zoo import SLOW, Zoo


def test_with_one_replica_requests_wait_for_its_restart(front: Front):
    before, killed = front.ask(), front.pid()
    os.kill(killed, signal.SIGKILL)
    assert front.ask() == before
    assert front.pid() != killed


def test_with_two_replicas_no_request_fails(zoo: Zoo):
    client = zoo.client()

    def ask(number: int) -> str:
        asked = {"model": SLOW, "messages": [{"role": "user", "content": f"words {number}"}]}
        if number % 2:
            return client.chat.completions.create(**asked).choices[0].message.content
        stream = client.chat.completions.create(**asked, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    try:
        with ThreadPoolExecutor(8) as many:
            asked = [many.submit(ask, number) for number in range(100)]
            zoo.kill(*next(iter(zoo.pids().items())))
            asked += [many.submit(ask, number) for number in range(100)]
            answers = [request.result() for request in asked]
        assert answers == [f"words {number}" for number in range(100)] * 2
    finally:
        zoo.whole()
