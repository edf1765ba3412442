"""Keys that a LiteLLM proxy made: their users change the address, and nothing else."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
from served import Served, chat, until
from test_tenants import bearer
from typer.testing import CliRunner

from penstock.cli.app import app

pytestmark = pytest.mark.parity("X6")

CI, OTHER, BLOCKED = "sk-2fXq0yJ6v1Zk3m9c8bQw7A", "sk-aaaaaaaaaaaaaaaaaaaaaa", "sk-bbbbbbbbbbbbbbbbbbbbbb"


def run(*words: object) -> None:
    found = CliRunner().invoke(app, ["keys", *map(str, words)])
    assert found.exit_code == 0, found.output


@pytest.fixture
def file(tmp_path: Path) -> Path:
    def listed(key: str, alias: str, **more: object) -> dict[str, object]:
        return {"token": sha256(key.encode()).hexdigest(), "key_alias": alias, "team_id": "t", **more}

    keys = [
        listed(CI, "ci", models=["m"], rpm_limit=4),
        listed(OTHER, "other", models=["n"]),
        listed(BLOCKED, "blocked", blocked=True),
    ]
    exported, file = tmp_path / "litellm.json", tmp_path / "keys.yaml"
    exported.write_text(json.dumps({"keys": keys, "teams": [{"team_id": "t", "team_alias": "web"}]}))
    run("import", exported, "--file", file)
    return file


async def test_a_client_goes_on_with_its_key_within_its_limit_until_it_is_revoked(served: Served, file: Path):
    gateway = await served.gateway("m", "n", keys_file=str(file))
    await served.replica(reply="yes")
    client = served.openai(CI)
    assert [one.id for one in (await client.models.list()).data] == ["m"]
    for _ in range(2):
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
    assert answer.choices[0].message.content == "yes"
    async with served.http() as http:

        async def status(headers: dict[str, str], model: str = "m") -> int:
            return (
                await http.post("/v1/chat/completions", json=chat(model=model), headers=headers)
            ).status_code

        assert await status({"x-api-key": CI}) == 200
        assert await status({"authorization": f"bearer {CI}"}) == 200
        limited = await http.post("/v1/chat/completions", json=chat(), headers=bearer(CI))
        assert (limited.status_code, limited.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert limited.headers["x-ratelimit-limit-requests"] == "4"
        assert await status(bearer(OTHER)) == 404  # no model of this key
        wrong = (BLOCKED, CI[:-1], f"{CI}A", CI.removeprefix("sk-"), sha256(CI.encode()).hexdigest())
        assert {await status(bearer(one)) for one in wrong} == {401}
        run("revoke", "web/ci", "--file", file)
        keys = gateway._tenants.keys
        await until(lambda: keys.find(CI.encode(), 0.0) is None, limit_s=5)
        assert await status(bearer(CI)) == 401
        assert keys.find(OTHER.encode(), 0.0) is not None
