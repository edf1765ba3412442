"""The gateway's small decisions, each by itself: bodies, paths, headers, events, merged metrics."""

import pytest

from penstock.config import GatewayConfig, LLMConfig
from penstock.errors import BadRequest, ConfigError, MethodNotAllowed, ModelNotFound, NotFound
from penstock.serve import body, headers, routes, scrape
from penstock.serve.cards import Catalogue, ModelCard
from penstock.serve.deployments import LLMRouter
from penstock.serve.relay import whole_events
from penstock.serve.routes import By

FORM = "multipart/form-data; boundary=ab"


def form(*parts: str) -> bytes:
    return "".join(f"--ab\r\n{part}\r\n" for part in parts).encode() + b"--ab--\r\n"


def catalogue(*ids: str, default: str | None = None, adapter_slots: int = 0) -> Catalogue:
    return Catalogue([ModelCard(model_id, 1, adapter_slots=adapter_slots) for model_id in ids], default)


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
    assert body.fields(content, b"application/json").model == named


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
    assert body.fields(content, FORM.encode()).model == named


def test_a_form_without_boundary_is_refused():
    with pytest.raises(BadRequest, match="boundary"):
        body.fields(b"--ab", b"multipart/form-data")


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
    "path", ["/", "/v1", "/v1/models/", "/metrics/", "/v1/responses/a/b", "/v1/responses/a%2f"]
)
def test_what_is_not_in_the_table_is_not_found(path: str):
    with pytest.raises(NotFound):
        routes.find(path)


def test_a_model_id_may_hold_slashes():
    route = routes.find("/v1/models/org/name:v1")
    assert (route.by, route.argument) == (By.MODELS, "org/name:v1")


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
    assert whole_events(stream) == (whole, rest)


def test_an_event_too_large_to_hold_is_passed_in_pieces():
    assert whole_events(b"data: " + b"x" * (1 << 20)) == (b"data: " + b"x" * (1 << 20), b"")


def test_merged_metrics_declare_each_family_once_and_label_each_sample():
    text = (
        '# HELP a Some.\n# TYPE a gauge\na 1\na{b="c d"} 2\n# HELP e E.\n# TYPE e counter\ne_total{} 3 1700\n'
    )
    assert scrape.merge({"r1": text, "r2": text}).decode().splitlines() == [
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
    assert made.init_args[2].processes == processes
