"""`penstock ctl` against a server that records what it is asked."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app

STATUS = {
    "m": {
        "desired": {"state": "awake", "weights": "first", "version": 1},
        "replicas": {"r1": {"actual": "awake", "weights": "first", "reached": True}},
    }
}
DONE = {"model": "m", "ok": True, "replicas": {"r1": {"result": None}}}


class Recorder(ThreadingHTTPServer):
    """Answers each path with what `replies` says: a status and an object."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.seen: list[tuple[str, str | None, Any]] = []
        self.replies: dict[str, tuple[int, Any]] = {"/admin/status": (200, STATUS)}


class Handler(BaseHTTPRequestHandler):
    server: Recorder  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        size = int(self.headers.get("content-length", 0))
        body = json.loads(self.rfile.read(size)) if size else None
        self.server.seen.append((self.path, self.headers["authorization"], body))
        status, reply = self.server.replies.get(self.path.partition("?")[0], (200, DONE))
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def service():
    server = Recorder()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ctl(*words: str, admin_key: str = "from-env"):
    return CliRunner().invoke(app, ["ctl", *words], env={"PENSTOCK_ADMIN_KEY": admin_key})


@pytest.mark.parametrize("before", [True, False])
def test_common_options_may_stand_before_and_after_the_command(service: Recorder, before: bool):
    common = ["--url", service.url, "--model=m", "--replica", "r1", "--timeout", "3", "--admin-key", "given"]
    command = ["sleep", "--level", "2"]
    done = ctl(*common, *command) if before else ctl(*command, *common)
    assert (done.exit_code, done.output) == (0, "m  r1  done\n")
    body = {"model": "m", "replica": "r1", "timeout_s": 3.0, "level": 2, "mode": "wait"}
    assert service.seen == [("/admin/sleep", "Bearer given", body)]


def test_admin_key_of_the_environment_is_sent(service: Recorder):
    ctl("resume", "--url", service.url)
    assert [key for _, key, _ in service.seen] == ["Bearer from-env"]


def test_option_without_its_value_is_an_error():
    done = ctl("status", "--url")
    assert done.exit_code == 2
    assert "'--url' requires an argument" in done.stderr


def test_arguments_of_rpc_may_look_like_options_after_two_dashes(service: Recorder):
    ctl("rpc", "--url", service.url, "load", "1", 'name="x"')
    assert [(body["args"], body["kwargs"]) for *_, body in service.seen] == [([1], {"name": "x"})]
    assert "not valid JSON" in ctl("rpc", "load", "--", "--url").stderr


def test_status_is_lines_or_json(service: Recorder):
    assert ctl("status", "--url", service.url, "--model", "a/b").stdout.splitlines() == [
        "m  desired: awake, weights first (version 1)",
        "  r1  awake, weights first",
    ]
    assert service.seen[0][0] == "/admin/status?model=a%2Fb"
    assert json.loads(ctl("status", "--json", "--url", service.url).stdout) == STATUS


def test_status_says_how_much_batch_may_run(service: Recorder):
    batch = {"limit": 12, "requests": 30, "requeued": 2}
    replica = {**STATUS["m"]["replicas"]["r1"], "batch": batch}
    service.replies["/admin/status"] = (200, {"m": {**STATUS["m"], "replicas": {"r1": replica}}})
    shown = ctl("status", "--url", service.url).stdout.splitlines()[1]
    assert shown == "  r1  awake, weights first; batch: 30 requests, 12 may run"


def test_replica_that_fails_is_exit_code_1(service: Recorder):
    failed = {"model": "m", "ok": False, "replicas": {"r1": {"error": "It is busy."}}}
    service.replies["/admin/pause"] = (502, failed)
    done = ctl("pause", "--url", service.url)
    assert (done.exit_code, done.stdout) == (1, "m  r1  failed: It is busy.\n")


@pytest.mark.parametrize(
    ("status", "reply", "says"),
    [
        (401, {"error": {"message": "The key is wrong."}}, "The key is wrong. The admin key is"),
        (404, {"error": {"message": "There is no path /admin/status."}}, "has no admin endpoints"),
        (400, {"error": {"message": "There is no model 'x'."}}, "There is no model 'x'."),
        (200, "text", 'answered with status 200: "text"'),
    ],
)
def test_refusal_is_a_sentence(service: Recorder, status: int, reply: Any, says: str):
    service.replies["/admin/status"] = (status, reply)
    done = ctl("status", "--url", service.url)
    assert done.exit_code == 1
    assert says in done.stderr


@pytest.mark.parametrize("command", ["usage --by=foo", "ctl status --model=foo"])
def test_a_mistake_in_the_command_that_the_service_finds_is_exit_code_2(service: Recorder, command: str):
    error = {"message": "'foo' is wrong.", "code": "invalid_request"}
    service.replies |= dict.fromkeys(("/admin/usage", "/admin/status"), (400, {"error": error}))
    done = CliRunner().invoke(app, [*command.split(), "--url", service.url])
    assert (done.exit_code, "'foo' is wrong." in done.stderr) == (2, True)


def test_a_fleet_without_an_admin_key_says_so(service: Recorder):
    refusal = {"error": {"message": "There is no path '/admin/fleet/history' here."}}
    service.replies["/admin/fleet/history"] = (404, refusal)
    done = CliRunner().invoke(app, ["history", "--url", service.url])
    assert "start it with PENSTOCK_ADMIN_KEY" in done.stderr
