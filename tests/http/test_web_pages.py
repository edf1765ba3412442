"""A service without a key on 127.0.0.1: its user's programs may use it, web pages may not."""

import socket

import pytest
from served import Served, chat

from penstock.config import GatewayConfig
from penstock.errors import Forbidden
from penstock.serve.http.cors import PageFilter

LOCAL = {"port": 8000, "api_key": None}
PAGE = "https://app.example.com"


def status(headers: dict[str, str], **config) -> int:
    fields = {name.encode(): value.encode() for name, value in headers.items()}
    try:
        PageFilter(GatewayConfig(**{**LOCAL, **config})).check(fields)
    except Forbidden as error:
        return error.status
    return 200


async def test_a_page_without_a_preflight_is_refused_and_told_why(served: Served):
    await served.gateway("m", **LOCAL)
    await served.replica(reply="yes")
    async with served.http() as http:
        text = {"content-type": "text/plain", "origin": "https://evil.example"}
        refused = await http.post("/v1/chat/completions", json=chat(), headers=text)
        rebound = await http.get("/v1/models", headers={"host": "evil.example:8000"})
        own = await http.post("/v1/chat/completions", json=chat(), headers={"origin": served.url})
        probes = [await http.get(at, headers={"host": "evil.example"}) for at in ("/livez", "/health")]
    assert refused.status_code == rebound.status_code == 403
    assert "https://evil.example" in refused.json()["error"]["message"]
    assert "'evil.example:8000' is refused" in rebound.json()["error"]["message"]
    assert [answer.status_code for answer in (own, *probes)] == [200] * 3


async def test_with_a_key_pages_need_nothing_else(served: Served):
    await served.gateway("m", port=8000, api_key="key")
    async with served.http(headers={"authorization": "Bearer key"}) as http:
        answer = await http.get("/v1/models", headers={"origin": PAGE, "host": "elsewhere.example"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "host",
    ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST", "10.1.2.3", "demo.localhost", ""]
    + ["host.docker.internal:8000", socket.gethostname()],
)
def test_programs_reach_a_local_service_by_these_names(host: str):
    assert status({"host": host} if host else {}) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example", "[x"]
)
def test_names_that_anybody_can_bind_are_refused(host: str):
    assert status({"host": host, "origin": f"http://{host}"}) == 403


@pytest.mark.parametrize("listens", [{"host": "0.0.0.0"}, {"host": "10.1.2.3"}, {"port": None}])
def test_in_a_cluster_any_host_name_is_served(listens: dict):
    """Serve's HTTP, and clients that use a name of DNS such as a Kubernetes service's."""
    assert status({"host": "penstock.ns.svc:8000"}, **listens) == 200
    assert status({"host": "penstock.ns.svc:8000", "origin": "https://evil.example"}, **listens) == 403


@pytest.mark.parametrize("origin", ["null", "http://localhost:3000", "http://127.0.0.1:80000", "https://x"])
def test_only_the_services_own_pages_need_no_cors(origin: str):
    assert status({"host": "127.0.0.1:8000", "origin": origin}) == 403
    assert status({"host": "127.0.0.1:8000", "origin": origin}, cors={"origins": ["*"]}) == 200


def test_an_origin_of_cors_is_served_and_so_is_its_host():
    cors = {"origins": [PAGE]}
    assert status({"host": "127.0.0.1:8000", "origin": PAGE}, cors=cors) == 200
    assert status({"host": "app.example.com"}, cors=cors) == 200
    assert status({"host": "127.0.0.1:8000", "origin": "https://evil.example"}, cors=cors) == 403
