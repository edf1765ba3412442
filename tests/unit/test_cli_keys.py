"""`penstock keys`: a file of keys is changed whole, by one command at a time, and holds no key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.config import GatewayConfig
from penstock.config.loading.keys_file import changing, load
from penstock.config.schema.tenants import KeyConfig, hashed
from penstock.errors import ConfigError

KEY = "a-key-that-a-person-chose"


def keys(*words: object, code: int = 0) -> str:
    """What it prints."""
    found = CliRunner().invoke(app, ["keys", *map(str, words)])
    assert found.exit_code == code, found.output
    return found.stdout if code == 0 else found.output


def create(file: Path, *words: str, tenant: str = "search", name: str = "ci") -> str:
    return keys("create", "--tenant", tenant, "--name", name, "--file", file, *words).strip()


@pytest.mark.parametrize("name", ["keys.yaml", "keys.json"])
def test_a_key_is_shown_once_and_stored_as_its_hash(tmp_path: Path, name: str):
    file = tmp_path / name
    limits = ("--limit", "tokens_per_minute=1000", "--limit", "open_requests=2")
    key = create(file, "--models", "qwen,llama:legal", "--scopes", "chat,batch", "--expires", "90d", *limits)
    assert key.startswith("pk_")
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    (one,) = load(file).keys
    assert (one.hash, one.models, one.scopes) == (hashed(key), ["qwen", "llama:legal"], ["chat", "batch"])
    assert (one.limits.tokens_per_minute, one.limits.open_requests) == (1000, 2)
    assert one.expires == pytest.approx(time.time() + 90 * 86_400, abs=60)
    shown = keys("list", "--file", file)
    assert key not in shown
    assert "search/ci  qwen,llama:legal  chat,batch  until " in shown
    assert json.loads(keys("list", "--file", file, "--json"))[0]["id"] == hashed(key)[7:15]


def test_a_rotated_key_goes_on_for_a_while(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    old = create(file, "--models", "qwen")
    new = keys("rotate", "search/ci", "--keep", "2h", "--file", file).strip()
    first, second = load(file).keys
    assert (first.hash, second.hash) == (hashed(old), hashed(new))
    assert (second.models, second.expires) == (["qwen"], None)
    assert first.expires == pytest.approx(time.time() + 7200, abs=60)


@pytest.mark.parametrize("form", ["number", "text", "other zone"])
def test_a_rotated_key_ends_no_later_than_before(tmp_path: Path, form: str):
    file = tmp_path / "keys.json"
    create(file)
    values, ends = json.loads(file.read_text()), int(time.time()) + 3600
    at = datetime.fromtimestamp(ends, UTC)
    east = at.astimezone(timezone(timedelta(hours=14)))
    values["keys"][0]["expires"] = {
        "number": ends,
        "text": at.isoformat(),
        "other zone": east.isoformat(),
    }[form]
    file.write_text(json.dumps(values))
    keys("rotate", "search/ci", "--keep", "2h", "--file", file)
    assert [one.expires for one in load(file).keys] == [ends, ends]


def test_a_key_is_revoked_by_its_name_or_its_id(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    first, _ = create(file), create(file, name="b")
    keys("revoke", hashed(first)[7:15], "--file", file)
    assert [one.name for one in load(file).keys] == ["b"]
    keys("revoke", "search/b", "--file", file)
    assert load(file).keys == []
    assert "has no key 'search/b'" in keys("revoke", "search/b", "--file", file, code=1)


def test_a_key_from_the_environment_has_an_id_as_others_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, its_id = tmp_path / "keys.yaml", hashed(KEY)[7:15]
    monkeypatch.setenv("TEAM_KEY", KEY)
    file.write_text("keys: [{tenant: search, name: ci, key: '${TEAM_KEY}'}]")
    assert keys("list", "--file", file).startswith(f"{its_id}  search/ci")
    assert "has no key ''" in keys("revoke", "", "--file", file, code=1)
    assert keys("revoke", its_id, "--file", file) == f"Revoked search/ci, id {its_id}.\n"
    assert load(file).keys == []


def test_no_key_is_made_that_would_be_refused_from_the_start(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    create(file)
    file.write_text(file.read_text() + "  expires: 2026-01-01\n")
    before = file.read_bytes()
    said = "search/ci expired on 2026-01-01, as its successor would"
    assert said in keys("rotate", "search/ci", "--file", file, code=2)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--scopes", "chat,foo"), "'foo' is not allowed"),
        (("--expires", "soon"), "neither a duration"),
        (("--expires", "2020-01-01"), "is over"),
        (("--expires", ""), "neither a duration"),
        (("--models", ""), "write names with commas"),
        (("--scopes", "chat,"), "write names with commas"),
        (("--limit", "tokens=5"), "limits"),
        (("--limit", f"open_requests={10**16}"), "at most"),
        (("--limit", "open_requests"), "write a limit's name and a number"),
        (("--limit", "open_requests=0"), "greater than 0"),
        (("--limit", "open_requests=1.5"), "open_requests"),
        (("--tenant", "a/b"), "must be"),
    ],
)
def test_what_is_wrong_is_said_and_changes_nothing(tmp_path: Path, words: tuple[str, ...], said: str):
    file = tmp_path / "keys.yaml"
    create(file)
    before = file.read_bytes()
    assert said in keys("create", "--tenant", "t", "--name", "n", "--file", file, *words, code=2)
    assert file.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["keys.yaml", ".keys.yaml.lock"] or len(
        list(tmp_path.iterdir())
    ) == 2


def test_a_broken_file_is_left_alone(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    for text in ("keys: [", "- 1", "keys: 5", "kyes: []"):
        file.write_text(text)
        keys("create", "--tenant", "t", "--name", "n", "--file", file, code=2)
        assert file.read_text() == text


def test_a_file_that_nothing_changes_keeps_its_comments(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    file.write_text("keys: []  # none yet")
    with changing(file) as values:
        values["keys"] = []
    assert file.read_text() == "keys: []  # none yet"


@pytest.mark.parametrize("file", ["", "/"])
def test_a_folder_is_no_file_of_keys(file: str):
    """As where the shell's variable is not set: --file "$KEYS"."""
    said = keys("create", "--tenant", "t", "--name", "n", "--file", file, code=2)
    assert f"'{file or '.'}' is a folder; name a file of keys in it." in said


def test_a_folder_that_takes_no_file_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    file = tmp_path / "file" / "keys.yaml"
    said = keys("create", "--tenant", "t", "--name", "n", "--file", file, code=2)
    assert f"{file}: cannot be written: Not a directory." in said


def test_commands_at_the_same_time_lose_no_key(tmp_path: Path):
    file = tmp_path / "keys.json"
    words = [sys.executable, "-m", "penstock.cli", "keys", "create", "--tenant", "t", "--file", str(file)]
    made = [subprocess.Popen([*words, "--name", f"n{i}"], stdout=subprocess.DEVNULL) for i in range(4)]
    assert [one.wait() for one in made] == [0] * 4
    assert sorted(one.name for one in load(file).keys) == ["n0", "n1", "n2", "n3"]


# -- in a config


def test_a_key_in_a_config_is_hashed_and_not_kept(monkeypatch):
    monkeypatch.setenv("CI_KEY", KEY)
    plain, named = (KeyConfig.parse({"tenant": "t", "name": "n", "key": key}) for key in (KEY, "${CI_KEY}"))
    assert plain == named
    assert plain.hash == hashed(KEY)
    assert KEY not in f"{plain!r} {plain.model_dump()} {vars(plain)}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "neither `hash` nor `key`"),
        ({"key": KEY, "hash": hashed(KEY)}, "not both"),
        ({"key": "short-secret"}, "20 or more"),
        ({"key": KEY + " and blanks"}, "20 or more"),
        ({"key": "${NO_SUCH_NAME}"}, "has no NO_SUCH_NAME"),
        ({"key": 12345678901234567890}, "must be a string"),
        ({"key": KEY, "tenant": "-"}, "must be"),
        ({"key": KEY, "nmae": "x"}, "nmae"),
        ({"key": KEY, "expires": "tomorrow"}, "write a date"),
        ({"hash": KEY}, "must be"),
    ],
)
def test_what_is_wrong_with_a_key_is_said_without_it(given, said: str):
    with pytest.raises(ConfigError) as refused:
        GatewayConfig.parse({"keys": [{"tenant": "t", "name": "n", **given}]})
    assert said in str(refused.value)
    if "hash" not in given:
        assert not any(str(secret) in str(refused.value) for secret in (KEY, "short-secret", 1234567890))


def test_dates_are_in_utc(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    texts = ("2027-01-31", "2027-01-31T00:00:00", "'2027-01-31'", "2027-01-31T01:00:00+01:00")
    for text in texts:
        file.write_text(f"keys: [{{tenant: t, name: n, hash: '{hashed(KEY)}', expires: {text}}}]")
        assert load(file).keys[0].expires == 1_801_353_600.0


def test_a_file_keeps_its_mode_and_its_owner(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    create(file)
    file.chmod(0o664)
    if os.geteuid() == 0:
        os.chown(file, 1234, 1234)
    before, umask = file.stat(), os.umask(0o027)
    try:
        create(file, name="other")
    finally:
        os.umask(umask)
    after = file.stat()
    assert after.st_ino != before.st_ino
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
