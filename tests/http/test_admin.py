"""The admin endpoints: not there without a key of theirs, and no client's key opens them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from served import Served

pytestmark = pytest.mark.parity("S25")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def never(operation: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    raise AssertionError(f"{operation} must not be reached")


class Asked:
    """What the fleet was asked, and what it answers."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self.heard: list[tuple[str, Mapping[str, Any]]] = []
        self._answer = answer

    async def __call__(self, operation: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
        self.heard.append((operation, asked))
        return self._answer


async def test_without_an_admin_key_there_are_no_such_paths(served: Served):
    await served.gateway("m", api_key=None, admin_key=None, operate=never)
    async with served.http() as http:
        answer = await http.post("/admin/sleep", headers=bearer("any"))
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].startswith("There is no path '/admin/sleep'")


async def test_the_clients_key_does_not_open_them(served: Served):
    await served.gateway("m", api_key="client", admin_key="admin", operate=never)
    async with served.http() as http:
        for headers in ({}, bearer("client"), bearer("wrong")):
            assert (await http.post("/admin/sleep", headers=headers)).status_code == 401
        assert (await http.get("/v1/models", headers=bearer("admin"))).status_code == 401


async def test_an_operation_is_passed_on_with_whom_it_is_for(served: Served):
    asked = Asked({"model": "m", "ok": True, "replicas": {"r": {"result": object}}})
    await served.gateway("m", admin_key="admin", operate=asked)
    async with served.http() as http:
        body = {"replica": "r", "timeout_s": 3, "level": 2}
        answer = await http.post("/admin/sleep?model=m", json=body, headers=bearer("admin"))
        assert answer.json()["replicas"] == {"r": {"result": "<class 'object'>"}}
        given = {"model": "m", "replica": "r", "timeout_s": 3.0, "level": 2}
        assert asked.heard == [("sleep", {**given, "changed_by": "the admin key"})]


async def test_the_status_of_a_replica_says_how_much_batch_may_run(served: Served):
    replica = await served.replica("m")
    here, other = replica.address.replica_id, "starting"
    asked = Asked({"m": {"desired": {}, "replicas": {here: {"actual": "ready"}, other: {}}}})
    await served.gateway("m", admin_key="admin", operate=asked)
    await served.until_ready("m", replica.address)
    async with served.http() as http:
        answer = await http.get("/admin/status", headers=bearer("admin"))
    batch = {"limit": replica.share.limit, "requests": 0, "requeued": 0}
    assert answer.json()["m"]["replicas"] == {here: {"actual": "ready", "batch": batch}, other: {}}
    assert asked.heard == [("status", {})]


async def test_what_one_replica_failed_at_is_no_success(served: Served):
    found = {"model": "m", "ok": False, "replicas": {"r": {"error": "It burns."}, "s": {"result": None}}}
    await served.gateway("m", admin_key="admin", operate=Asked(found))
    async with served.http() as http:
        answer = await http.post("/admin/wakeup", headers=bearer("admin"))
        assert (answer.status_code, answer.json()) == (502, found)


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"model": 3}', b'{"timeout_s": "soon"}'])
async def test_what_is_no_object_of_arguments_is_refused(served: Served, body: bytes):
    await served.gateway("m", admin_key="admin", operate=never)
    async with served.http() as http:
        answer = await http.post("/admin/sleep", content=body, headers=bearer("admin"))
        assert answer.status_code == 400
        assert "JSON object" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "says"),
    [
        ("POST", "sleep", {"operation": "wakeup"}, "It takes level, mode"),
        ("POST", "sleep", {"self": 1}, "It takes level, mode"),
        ("POST", "sleep", {"level": 3}, "level"),
        ("POST", "sleep", {"timeout_s": -1}, "timeout_s"),
        ("POST", "update_weights", {"source": "here", "version": "1"}, "absolute"),
        ("POST", "no_such_operation", {}, "there are sleep, wakeup"),
        ("GET", "status", {"replica": "r"}, "takes a model"),
        ("GET", "status", {"timeout_s": 3}, "takes a model"),
    ],
)
async def test_arguments_that_an_operation_does_not_take_are_refused(
    served: Served, method: str, path: str, body: dict[str, Any], says: str
):
    await served.gateway("m", admin_key="admin", operate=never)
    async with served.http() as http:
        answer = await http.request(method, f"/admin/{path}", json=body, headers=bearer("admin"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request")
        assert says in answer.json()["error"]["message"]


async def test_a_wrong_method_says_which_is_right(served: Served):
    await served.gateway("m", admin_key="admin", operate=never)
    async with served.http() as http:
        assert (await http.get("/admin/sleep", headers=bearer("admin"))).headers["allow"] == "POST, OPTIONS"
        wrong = await http.post("/admin/status", headers=bearer("admin"))
        assert wrong.headers["allow"] == "GET, HEAD, OPTIONS"
