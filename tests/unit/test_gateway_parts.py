"""The gateway's small decisions, each by itself: bodies, paths, headers, events, merged metrics."""

import asyncio
import time

import pytest

from penstock.config import GatewayConfig, LLMConfig
from penstock.config.schema.jobs import JobsConfig
from penstock.errors import (
    BadRequest,
    ConfigError,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    TooLarge,
)
from penstock.metrics import GatewayMetrics
from penstock.serve.deployments import LLMRouter
from penstock.serve.fleet.table import Replica, Table
from penstock.serve.gateway import admin, admission, body, routes
from penstock.serve.gateway.catalogue import Catalogue, ServedModel
from penstock.serve.gateway.relay import Events
from penstock.serve.gateway.request import ClientRequest
from penstock.serve.gateway.response import ClientResponse
from penstock.serve.gateway.telemetry import engine_metrics
from penstock.serve.gateway.telemetry.timing import Timing
from penstock.serve.routing import policy
from penstock.transport import headers
from penstock.transport.address import Address

FORM = "multipart/form-data; boundary=ab"


def form(*parts: str) -> bytes:
    return "".join(f"--ab\r\n{part}\r\n" for part in parts).encode() + b"--ab--\r\n"


async def looked(content: bytes, content_type: bytes, free: bool = False) -> body.Fields:
    """What the gateway reads of a whole body."""
    whole = body.RequestBody(body.BodyBudget(len(content)))
    whole.content = content
    await whole.look(content_type, free)
    return whole.fields


def catalogue(*ids: str, default: str | None = None, adapter_slots: int = 0) -> Catalogue:
    return Catalogue([ServedModel(model_id, 1, adapter_slots=adapter_slots) for model_id in ids], default)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"messages": [{"model": "inner"}], "model": "outer"}', "outer"),
        (b'{"model": "first", "model": "last"}', "last"),
        (b'{"model": null}', None),
        (b"{}", None),
        (b"", None),
    ],
)
def test_model_is_found_in_json(content: bytes, named: str | None):
    assert asyncio.run(looked(content, b"application/json")).model == named


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (form('content-disposition: form-data; name="model"\r\n\r\nwhisper'), "whisper"),
        (
            form(
                'Content-Disposition: form-data; name="file"; filename="model"\r\n\r\nname="model"\r\n\r\nno',
                'Content-Disposition: form-data; name="model"\r\nContent-Type: text/plain\r\n\r\nyes',
            ),
            "yes",
        ),
        (form('content-disposition: form-data; name="file"; filename="a"\r\n\r\nsound'), None),
        (form('content-disposition: form-data; name="model"\r\n\r\n'), None),
    ],
)
def test_model_is_found_in_a_form(content: bytes, named: str | None):
    assert asyncio.run(looked(content, FORM.encode())).model == named


@pytest.mark.parametrize("kind", ["; charset=utf-8; Boundary=ab", '; boundary="ab"; x=y', ";boundary=ab ; x"])
def test_the_boundary_is_found_however_it_is_written(kind: str):
    content = form('content-disposition: form-data; name="model"\r\n\r\nm')
    assert asyncio.run(looked(content, b"multipart/form-data" + kind.encode())).model == "m"


@pytest.mark.parametrize(
    "inside", ["--ab\r\n{}", "\r\n--abc\r\n{}", "x--ab\r\n{}"], ids=["no line", "longer", "in a line"]
)
def test_what_only_looks_like_a_boundary_is_none(inside: str):
    hidden = inside.format('content-disposition: form-data; name="model"\r\n\r\nno')
    content = form(
        f'content-disposition: form-data; name="file"; filename="a"\r\n\r\nx{hidden}',
        'content-disposition: form-data; name="model"\r\n\r\nyes',
    )
    assert asyncio.run(looked(content, FORM.encode())).model == "yes"


def test_the_end_of_a_form_is_its_end():
    content = form() + b'\r\n--ab\r\ncontent-disposition: form-data; name="model"\r\n\r\nno\r\n'
    assert asyncio.run(looked(content, FORM.encode())).model is None


def test_a_model_behind_slices_of_sound_is_found():
    sound = b"\r\n--a" * 200_000
    head = form('content-disposition: form-data; name="file"; filename="a"\r\n\r\n')[
        : -len(b"\r\n--ab--\r\n")
    ]
    content = head + sound + b"\r\n" + form('content-disposition: form-data; name="model"\r\n\r\nm')
    assert asyncio.run(looked(content, FORM.encode())).model == "m"


@pytest.mark.parametrize("content", [b"\r\n--a" * 10_000, b"\r\n--a\r\nx: y\r\n\r\n" * 10_000])
def test_a_form_of_boundaries_is_given_up_early(content: bytes):
    with pytest.raises(BadRequest, match="64 parts"):
        asyncio.run(looked(content, b"multipart/form-data; boundary=a"))


def test_a_boundary_longer_than_its_standard_allows_is_refused():
    with pytest.raises(BadRequest, match="70"):
        asyncio.run(looked(b"x", b"multipart/form-data; boundary=" + b"a" * 71))


def test_a_long_search_gives_others_their_turns():
    async def main() -> int:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        assert (await looked(b"\r\n" * 2_000_000, b"multipart/form-data; boundary=a")).model is None
        with pytest.raises(TooLarge, match="commas"):
            await looked(b'{"a": [' + b"1," * 5_000_000 + b"1]}", b"application/json")
        task.cancel()
        return turns

    assert asyncio.run(main()) > 30


def test_json_nested_too_deeply_is_refused():
    with pytest.raises(BadRequest, match="nested too deeply"):
        asyncio.run(looked(b'{"messages": ' + b"[" * 100_000, b"application/json"))
    with pytest.raises(BadRequest, match="nested too deeply"):
        admin.arguments("sleep", b'{"x": ' + b"[" * 100_000, None)


def test_a_form_without_boundary_is_refused():
    with pytest.raises(BadRequest, match="boundary"):
        asyncio.run(looked(b"--ab", b"multipart/form-data"))


@pytest.mark.parametrize(
    ("name", "model_id", "adapter"),
    [
        ("a", "a", ""),
        ("a:x", "a", "x"),
        ("a:b", "a:b", ""),
        ("a:b:x", "a:b", "x"),
        ("a:bb", "a", "bb"),
        ("o/c:x:y", "o/c", "x:y"),
    ],
)
def test_the_longest_id_that_fits_is_meant_and_the_rest_is_the_adapter(
    name: str, model_id: str, adapter: str
):
    card, rest = catalogue("a", "a:b", "o/c", adapter_slots=1).resolve(name)
    assert (card.id, rest) == (model_id, adapter)


@pytest.mark.parametrize("name", [":" * 2_000_000, "a" + ":" * 2_000_000, "x" * 2_000_000])
def test_a_very_long_name_is_not_found_at_once(name: str):
    with pytest.raises(ModelNotFound, match="longer than 512"):
        catalogue("a", adapter_slots=1).resolve(name)


def test_a_query_of_many_parameters_is_refused():
    scope = {"method": "GET", "path": "/", "headers": [], "query_string": b"a=b&" * 101 + b"model=m"}
    with pytest.raises(BadRequest, match="100"):
        ClientRequest(scope, None).queried("model")


@pytest.mark.parity("S21")
def test_a_model_that_takes_no_adapters_says_what_to_set():
    with pytest.raises(BadRequest, match=r"'a' takes no adapters.*lora_config\.dynamic_lora_loading_path"):
        catalogue("a").resolve("a:x")


@pytest.mark.parametrize("name", ["b", ":", ":a", "a:", "aa:x", "o", "o/c/d"])
def test_other_names_are_not_found(name: str):
    with pytest.raises(ModelNotFound, match="'a', 'o/c'"):
        catalogue("a", "o/c").resolve(name)


def test_the_default_is_the_configured_or_the_only_model():
    assert catalogue("a").resolve(None)[0].id == "a"
    assert catalogue("a", "b", default="b").resolve("")[0].id == "b"
    with pytest.raises(BadRequest, match="'a', 'b'"):
        catalogue("a", "b").resolve(None)


def test_a_default_that_is_not_served_is_refused_at_once():
    with pytest.raises(ConfigError, match="'c' is none of 'a', 'b'"):
        catalogue("a", "b", default="c")


def test_many_models_are_not_all_named_in_an_error():
    with pytest.raises(ModelNotFound, match="and 80 more"):
        catalogue(*(f"m{i}" for i in range(100))).resolve("x")


@pytest.mark.parametrize(
    ("root", "path", "inner"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/", "/v1/models", "/v1/models"),
        ("/llm", "/llm/v1/models", "/v1/models"),
        ("/llm/", "/llm/v1/models", "/v1/models"),
        ("/llm", "/llm", "/"),
        ("/llm", "/v1/models", "/v1/models"),
        ("/v1", "/v1/v1/models", "/v1/models"),
        ("/v", "/v1/models", "/v1/models"),
    ],
)
def test_a_prefix_is_stripped_where_it_is_one(root: str, path: str, inner: str):
    assert routes.below(root, path) == inner


@pytest.mark.parametrize(
    "path", ["/v1", "/v1/models/", "/metrics/", "/v1/responses/a/b", "/v1/responses/a%2f"]
)
def test_what_is_not_in_the_table_is_not_found(path: str):
    with pytest.raises(NotFound):
        routes.find(path)


def test_a_model_id_may_hold_slashes():
    route = routes.find("/v1/models/org/name:v1")
    assert (route.handler, route.argument) == ("models", "org/name:v1")


def test_methods_are_checked_and_head_is_a_get():
    routes.check_method(routes.find("/health"), "HEAD")
    with pytest.raises(MethodNotAllowed, match="GET, HEAD, OPTIONS"):
        routes.check_method(routes.find("/health"), "PUT")


@pytest.mark.parametrize("target", [b"/x?a=1\r\nhost: evil", b"/x HTTP/1.1"])
def test_no_line_break_reaches_the_replica(target: bytes):
    with pytest.raises(BadRequest):
        headers.to_replica("GET", target, [], [], 0)
    with pytest.raises(BadRequest):
        headers.to_replica("GET", b"/x", [(b"a", b"b\nc: d")], [], 0)


def test_a_call_by_handle_brings_no_credentials_and_nothing_that_is_ours():
    given = {"Authorization": "Bearer k", "X-API-Key": "k", "Cookie": "c", "X-Penstock-Adapter": "a"}
    assert headers.of_handle({**given, "X-ClientRequest-Id": "r", "X-Tenant": "t"}) == {
        "X-ClientRequest-Id": "r",
        "X-Tenant": "t",
    }


async def test_a_line_of_the_log_has_no_line_break_of_the_client(caplog: pytest.LogCaptureFixture):
    scope = {"method": "GET", "path": "/x\nGET /forged 200", "headers": []}
    with caplog.at_level("INFO", logger="penstock.access"):
        ClientRequest(scope, None).account(
            ClientResponse(None, "r", Timing()), NotFound("There is no such path.")
        )
    assert "/x%0AGET%20/forged%20200" in caplog.text
    assert len(caplog.text.splitlines()) == 1


@pytest.mark.parametrize("given", [None, b"", b" x", b"a b", b"a\nb", b"x" * 129, "ä".encode(), b"-x"])
def test_an_unfit_request_id_is_replaced(given: bytes | None):
    assert len(headers.request_id(given)) == 32


def test_a_fit_request_id_is_kept():
    assert headers.request_id(b"trace-1.2:3/4") == "trace-1.2:3/4"


@pytest.mark.parametrize(
    ("stream", "whole", "rest"),
    [
        (b"data: 1\n\n", b"data: 1\n\n", b""),
        (b"data: 1\n\ndata: 2", b"data: 1\n\n", b"data: 2"),
        (b"data: 1", b"", b"data: 1"),
        (b"data: 1\r\n\r\ndata:", b"data: 1\r\n\r\n", b"data:"),
        (b"data: 1\r\n\r\ndata: 2\n\nx", b"data: 1\r\n\r\ndata: 2\n\n", b"x"),
    ],
)
def test_events_are_passed_on_whole(stream: bytes, whole: bytes, rest: bytes):
    events = Events()
    assert (events.of(stream), events.rest) == (whole, rest)


def test_an_event_too_large_to_hold_is_passed_in_pieces():
    events, stream = Events(), b"data: " + b"x" * (1 << 20)
    assert (events.of(stream), events.rest) == (stream, b"")


def test_merged_metrics_declare_each_family_once_and_label_each_sample():
    text = (
        '# HELP a Some.\n# TYPE a gauge\na 1\na{b="c d"} 2\n# HELP e E.\n# TYPE e counter\ne_total{} 3 1700\n'
    )
    assert engine_metrics.merge({"r1": text, "r2": text}).decode().splitlines() == [
        "# HELP a Some.",
        "# TYPE a gauge",
        'a{replica="r1"} 1',
        'a{replica="r1",b="c d"} 2',
        'a{replica="r2"} 1',
        'a{replica="r2",b="c d"} 2',
        "# HELP e E.",
        "# TYPE e counter",
        'e_total{replica="r1"} 3 1700',
        'e_total{replica="r2"} 3 1700',
    ]


@pytest.mark.parametrize(
    ("given", "processes"),
    [({}, 2), ({"num_replicas": 3}, 3), ({"autoscaling_config": {"max_replicas": 4}}, 4)],
)
def test_gateway_processes_are_replicas_of_its_deployment(given: dict[str, object], processes: int):
    model = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim")
    made = LLMRouter.as_deployment(given).bind([model], GatewayConfig(processes=2))._bound_deployment
    scaling = made._deployment_config.autoscaling_config
    assert (scaling.max_replicas if scaling else made.num_replicas) == processes
    assert made.init_kwargs["live"].gateway.processes == processes


def test_serve_takes_silent_processes_without_an_engine_for_dead_after_6_s():
    model = LLMConfig(model_loading_config={"model_id": "m"}, llm_engine="sim")
    gateway = LLMRouter.as_deployment().bind([model], jobs=JobsConfig())._bound_deployment
    control, (_, jobs) = gateway.init_kwargs["control"], gateway.init_kwargs["jobs"]
    for bound in (gateway, control._bound_deployment, jobs._bound_deployment):
        config = bound._deployment_config
        assert config.health_check_period_s + 3 * config.health_check_timeout_s == pytest.approx(6, abs=0.2)


def test_the_first_of_a_long_line_is_found_at_once(patched):
    """In a dict it is not: Python looks over the places of all that stood before it."""
    line = admission.AdmissionQueue(
        ServedModel("m", 1), Table("n"), policy("round_robin"), GatewayMetrics().model("m"), 30.0
    )
    waiting = line._by_tier["default"]
    for number in range(100_000):
        waiting.put(number, None)
    patched(line, "_grant", lambda waiter, _: waiting.discard(waiter, None) is None)
    began = time.thread_time()
    line.offer(Replica("m", Address("a", "n", "/none", None, None, "s")))
    assert len(line) == 0
    assert time.thread_time() - began < 1
