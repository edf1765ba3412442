"""`penstock models` and `penstock status` against a real gateway."""

import asyncio
import json
import os
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
from certificates import write_pair
from served import Served

from penstock.cli.client.status import show_models, show_status
from penstock.errors import Unavailable


async def shown(command, served: Served, *, as_json: bool = False) -> int:
    return await asyncio.to_thread(partial(command, served.url, None, as_json=as_json))


async def test_models_and_the_health_of_each_are_listed(served: Served, capsys: pytest.CaptureFixture[str]):
    await served.gateway("m", "unstarted")
    await served.replica("m", max_model_len=2048)
    assert await shown(show_models, served) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["m          2,048 tokens", "unstarted  no replica has said its context window yet"]
    assert await shown(show_status, served) == 1
    first, *models = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{served.url}  unavailable")
    assert [line.split(",")[0].strip() for line in models] == [
        "m  1 of 1 replicas ready",
        "unstarted  0 of 0 replicas ready",
    ]


async def test_a_replica_that_is_missing_is_told_of(served: Served, capsys: pytest.CaptureFixture[str]):
    await served.gateway("m")
    await served.replica("m")
    served.table.wanted = {"m": 3}
    assert await shown(show_status, served) == 0
    assert "m  1 of 3 replicas ready, 2 starting or restarting" in capsys.readouterr().out
    async with served.http() as http:
        assert 'penstock_wanted_replicas{model="m"} 3.0' in (await http.get("/metrics")).text


async def test_the_admin_key_lists_models_too(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    await served.gateway("m", api_key="key", admin_key="the-admin-key")
    await served.replica("m")
    for key, line in (("wrong", "Models are listed with a key"), ("the-admin-key", "m  1 of 1 replicas")):
        monkeypatch.setenv("PENSTOCK_ADMIN_KEY", key)
        assert await shown(show_status, served) == 0
        assert line in capsys.readouterr().out


async def test_json_has_the_same(served: Served, capsys: pytest.CaptureFixture[str]):
    await served.gateway("m")
    await served.replica("m")
    assert await shown(show_models, served, as_json=True) == 0
    assert [model["id"] for model in json.loads(capsys.readouterr().out)] == ["m"]
    assert await shown(show_status, served, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["models"]["m"]["ready"]) == ("ok", 1)


async def test_no_service_is_told(free_port: int):
    for command in (show_models, show_status):
        with pytest.raises(Unavailable, match="Nothing answers"):
            await asyncio.to_thread(partial(command, f"127.0.0.1:{free_port}", None, as_json=False))


async def test_the_one_that_runs_here_is_found_with_its_port_and_certificate(served: Served, tmp_path: Path):
    """As `penstock serve` has noted it."""
    await served.gateway("m", tls=write_pair(tmp_path).config)
    await served.replica("m")
    begun = psutil.Process().create_time()
    note = {"id": os.getpid(), "begun": begun, "url": served.url, "models": ["m"]}
    folder = tmp_path / "penstock-serve-1"
    folder.mkdir()
    (folder / "service.json").write_text(json.dumps(note))
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli", "status"),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await command.communicate()
    assert (command.returncode, out.decode().split()[:2]) == (0, [served.url, "ok,"])
