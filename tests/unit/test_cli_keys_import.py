"""`penstock keys import`: LiteLLM's keys go on, with no more rights than they had, and the rest is said."""

from __future__ import annotations

import json
import os
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.test_cli_keys import create, keys

from penstock.cli.client.litellm import Export, Import
from penstock.config.loading.keys_file import load
from penstock.config.messages.location import Location
from penstock.config.schema.tenants import KeysConfig, hashed
from penstock.serve.tenancy.keys import KeyTable

pytestmark = pytest.mark.parity("X6")

OF_EACH: dict[str, Any] = {
    **dict.fromkeys(("key_alias", "team_id", "user_id", "expires", "blocked", "budget_id", "org_id")),
    **dict.fromkeys(("rpm_limit", "tpm_limit", "tpd_limit", "max_parallel_requests", "max_budget")),
    **dict.fromkeys(("soft_budget", "budget_duration", "litellm_budget_table", "object_permission")),
    "models": [],
    "metadata": {},
    "aliases": {},
    "model_max_budget": {},
    "allowed_routes": [],
    "spend": 0.0,
    "key_name": "sk-...abcd",
    "auto_rotate": False,
    "team_models": [],
}
"""Of what LiteLLM 1.110 says of a key in which nothing is set."""
WEB = {"team_id": "7d7f7a6c", "team_alias": "Web", "models": [], "blocked": False, "keys": [{"token": "x"}]}


def secret(number: int = 0) -> str:
    return f"sk-{number:022}"


def listed(number: int = 0, **more: Any) -> dict[str, Any]:
    return OF_EACH | {"token": sha256(secret(number).encode()).hexdigest()} | more


def imported(values: dict[str, Any], *answers: Any) -> Import:
    return Import(Export((one, Location("a.json")) for one in answers), values)


def entry(key: dict[str, Any], **answer: Any) -> dict[str, Any]:
    """What a key becomes, without what each entry has. answer: `teams` and `users`, as they are listed."""
    (one,) = imported({}, {"keys": [key], **answer}).added
    return {name: value for name, value in one.items() if name not in ("tenant", "name", "hash")}


def notes(key: dict[str, Any], **answer: Any) -> list[str]:
    return imported({}, {"keys": [key], **answer}).notes()


def run(folder: Path, *answers: Any, code: int = 0) -> str:
    """What the command prints of files with these answers."""
    for number, one in enumerate(answers):
        (folder / f"{number}.json").write_text(one if isinstance(one, str) else json.dumps(one))
    files = [folder / f"{number}.json" for number in range(len(answers))]
    return keys("import", *files, "--file", folder / "keys.yaml", code=code)


# -- what comes along


def test_a_key_goes_on_under_its_hash_with_its_team_models_and_limits(tmp_path: Path):
    limits = {"rpm_limit": 600, "tpm_limit": 200_000, "tpd_limit": 9, "max_parallel_requests": 20}
    key = listed(key_alias="ci", team_id=WEB["team_id"], models=["qwen"], expires="2030-01-31T00:00:00Z")
    answers = {"keys": [key | limits | {"max_budget": 100.0, "budget_duration": "30d"}]}, [WEB | limits]
    printed = run(tmp_path, *answers)
    found = load(tmp_path / "keys.yaml")
    (one,) = found.keys
    assert (one.tenant, one.name, one.models, one.expires) == ("Web", "ci", ["qwen"], 1_896_048_000.0)
    assert one.hash == hashed(secret())
    ours = {
        "requests_per_minute": 600,
        "tokens_per_minute": 200_000,
        "tokens_per_day": 9,
        "open_requests": 20,
    }
    assert one.limits.model_dump(exclude_none=True) == ours | {"cost_per_month": 100.0}
    assert found.tenants["Web"].limits.model_dump(exclude_none=True) == ours
    assert "keys added: 1, there before: 0, left out: 0." in printed
    assert secret() not in printed + (tmp_path / "keys.yaml").read_text()
    table = KeyTable()
    table.replace(found.keys, found.tenants)
    assert table.find(secret().encode(), 0.0) is not None
    assert table.find(f"{secret()}x".encode(), 0.0) is None


def test_a_second_time_nothing_changes(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    create(file)
    answers = {"keys": [listed(key_alias="ci", team_id="7d7f7a6c", rpm_limit=5)]}, [WEB | {"tpm_limit": 9}]
    run(tmp_path, *answers)
    before = file.stat().st_ino, file.read_bytes()
    assert "keys added: 0, there before: 1, left out: 0." in run(tmp_path, *answers)
    assert (file.stat().st_ino, file.read_bytes()) == before


@pytest.mark.parametrize("team", ["Web", "Another name"])
def test_keys_that_come_later_go_to_the_tenant_of_their_team(team: str):
    values: dict[str, Any] = {}
    imported(values, {"keys": [listed(team_id="7d7f7a6c")]}, [WEB])
    imported(
        values, {"keys": [listed(n, team_id="7d7f7a6c") for n in range(2)]}, [WEB | {"team_alias": team}]
    )
    assert [one["tenant"] for one in values["keys"]] == ["Web"] * 2


def test_a_key_that_has_moved_to_another_team_takes_nobody_with_it():
    values: dict[str, Any] = {}
    teams = [WEB, {"team_id": "b", "team_alias": "Beta"}]
    imported(values, {"keys": [listed(0, team_id="7d7f7a6c")]}, teams)
    of_keys = [listed(0, team_id="b"), listed(1, team_id="b"), listed(2, team_id="7d7f7a6c")]
    imported(values, {"keys": of_keys}, teams)
    assert [one["tenant"] for one in values["keys"]] == ["Web", "Beta", "Web"]


def test_limits_of_a_budget_hold_where_a_key_has_none():
    budget = {"soft_budget": 80.0, "max_budget": 100.0, "rpm_limit": 5, "budget_duration": "1mo"}
    found = entry(listed(rpm_limit=7, litellm_budget_table=budget))
    costs = {"cost_per_month": 100.0, "warn_cost_per_month": 80.0}
    assert found == {"limits": {"requests_per_minute": 7} | costs}


def test_a_limit_beyond_all_limits_is_the_largest_one():
    values: dict[str, Any] = {}
    imported(values, {"keys": [listed(tpm_limit=2**63 - 1, soft_budget=0.0)]})
    assert KeysConfig.parse(values).keys[0].limits.model_dump(exclude_none=True) == {
        "tokens_per_minute": 10**15
    }


@pytest.mark.parametrize(
    ("models", "of_team", "expected"),
    [
        (["qwen"], [], ["qwen"]),
        (["qwen", "llama"], ["llama", "gpt"], ["llama"]),
        ([], ["llama"], ["llama"]),
        (["all-team-models"], ["llama"], ["llama"]),
        (["all-team-models", "qwen"], ["llama"], ["llama"]),
        (["*"], ["all-proxy-models"], None),
        (["all-team-models"], [], None),
        (["openai/gpt"], ["openai/*"], ["openai/gpt"]),
    ],
)
def test_a_key_may_use_its_models_within_its_teams(
    models: list[str], of_team: list[str], expected: list[str] | None
):
    key, team = listed(team_id="7d7f7a6c", models=models), WEB | {"models": of_team}
    assert entry(key, teams=[team]).get("models") == expected
    user = {"user_id": "ann", "models": of_team}
    assert entry(key | {"team_id": None, "user_id": "ann"}, users=[user], total=1).get("models") == expected


def test_a_team_may_use_what_it_names_beside_no_default_models():
    team = WEB | {"models": ["no-default-models", "llama"]}
    key = listed(team_id="7d7f7a6c", models=["all-proxy-models"])
    assert entry(key, teams=[team]) == {"models": ["llama"]}


def test_keys_of_users_are_tenants_of_their_own_and_those_of_the_admin_are_default():
    ann = {"user_id": "u-1", "user_email": "ann@example.com", "rpm_limit": 5}
    of_ann = [listed(n, user_id="u-1", models=["qwen"]) for n in (0, 1)]
    values: dict[str, Any] = {}
    imported(values, {"keys": [*of_ann, listed(2, user_id="default_user_id"), listed(3)]}, {"users": [ann]})
    assert [one["tenant"] for one in values["keys"]] == ["ann-example.com"] * 2 + ["default"] * 2
    assert values["tenants"] == {"ann-example.com": {"limits": {"requests_per_minute": 5}}}


def test_keys_of_one_name_are_told_apart():
    values: dict[str, Any] = {"keys": [{"tenant": "Web", "name": "ci", "hash": hashed("made before" * 2)}]}
    same = [listed(n, key_alias="ci", team_id="7d7f7a6c") for n in range(2)]
    imported(values, {"keys": [*same, listed(2, team_id="7d7f7a6c")]}, [WEB])
    ids = [hashed(secret(n))[7:15] for n in range(3)]
    names = [one["name"] for one in values["keys"]]
    assert names == ["ci", f"ci-{ids[0]}", f"ci-{ids[1]}", f"key-{ids[2]}"]


@given(st.lists(st.tuples(st.text(max_size=70), st.text(max_size=70), st.text(max_size=70)), max_size=6))
def test_whatever_the_names_owners_stay_apart_and_twice_is_once(texts: list[tuple[str, str, str]]):
    teams = [
        {"team_id": f"{number}{its_id}", "team_alias": alias}
        for number, (alias, its_id, _) in enumerate(texts)
    ]
    of_keys = [
        listed(2 * number + twin, key_alias=name, team_id=team["team_id"])
        for number, (team, (*_, name)) in enumerate(zip(teams, texts, strict=True))
        for twin in range(2)
    ]
    values: dict[str, Any] = {}
    assert len(imported(values, {"keys": of_keys}, teams).added) == len(of_keys)
    found = KeysConfig.parse(values).keys
    assert len({one.tenant for one in found}) == len(teams)
    assert len({(one.tenant, one.name) for one in found}) == len(of_keys)
    again = imported(values, {"keys": of_keys[::-1]}, teams[::-1])
    assert (again.added, again.known) == ([], len(of_keys))


# -- what does not


@pytest.mark.parametrize(
    ("key", "team", "why"),
    [
        ({"blocked": True}, {}, "blocked"),
        ({}, {"blocked": True}, "blocked"),
        ({"expires": "2020-01-31T00:00:00Z"}, {}, "expired"),
        ({"rpm_limit": 0}, {}, "with a limit of 0"),
        ({"max_budget": 0.0}, {}, "with a limit of 0"),
        ({}, {"tpm_limit": 0}, "with a limit of 0"),
        ({"user_id": "off"}, {}, "blocked"),
    ],
)
def test_keys_that_nobody_can_use_are_left_out_and_counted(key: Any, team: Any, why: str):
    values: dict[str, Any] = {}
    users = [{"user_id": "off", "metadata": {"scim_active": False}}]
    found = imported(values, {"keys": [listed(team_id="7d7f7a6c", **key)], "users": users}, [WEB | team])
    assert (found.added, found.left, found.notes(), values.get("keys")) == ([], {why: 1}, [], None)


@pytest.mark.parametrize(
    ("key", "answer", "said"),
    [
        ({"team_id": "t"}, {}, "Left out: keys of a team that no file lists"),
        ({"team_id": "t", "models": ["qwen"]}, {}, "of a team that no file lists"),
        ({"user_id": "u"}, {}, "Left out: keys of a user whom no file lists"),
        ({"user_id": "u", "models": ["qwen"]}, {}, "Left out: keys of a user whom no file lists"),
        ({"project_id": "p"}, {}, "Left out: keys of projects"),
        ({"user_id": "u"}, {"users": [{"user_id": "u", "models": ["no-default-models", "a"]}]}, "no model"),
        ({"user_id": "u"}, {"users": [{"user_id": "v"}], "total": 2}, "add all pages of what `/user/list`"),
        ({"models": ["no-default-models"]}, {}, "Left out: keys that may use no model"),
        ({"user_id": "u"}, {"users": [{"user_id": "u", "models": ["no-default-models"]}]}, "use no model"),
        ({"allowed_routes": ["management_routes"]}, {}, "keys for some of LiteLLM's routes only"),
        ({"allowed_routes": ["/v1/embeddings"]}, {}, "keys for some of LiteLLM's routes only"),
    ],
)
def test_a_key_that_could_do_more_than_before_is_left_out_and_named(key: Any, answer: Any, said: str):
    found = imported({}, {"keys": [listed(key_alias="ci", **key)], **answer})
    assert (found.added, found.left) == ([], {"named on stderr": 1})
    (note,) = found.notes()
    assert said in note
    assert note.endswith("/ci.")


@pytest.mark.parametrize(
    "key",
    [
        {"user_id": "u"},
        {"allowed_routes": ["llm_api_routes"]},
        {"object_permission": {"object_permission_id": "x"}},
    ],
)
def test_what_restricts_nothing_is_nothing_to_say(key: Any):
    assert entry(listed(**key), users=[{"user_id": "v"}], total=1) == {}
    assert notes(listed(**key), users=[{"user_id": "v"}], total=1) == []


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            {"metadata": {"model_rpm_limit": {"qwen": 0}}},
            "Not imported: LiteLLM's `model_rpm_limit`, of default/ci.",
        ),
        ({"metadata": {"tags": ["a"]}}, "Not imported: LiteLLM's `tags`, of default/ci."),
        ({"aliases": {"gpt": "qwen"}}, "Not imported: LiteLLM's `aliases`, of default/ci."),
        ({"object_permission": {"mcp_servers": ["a"]}}, "LiteLLM's `object_permission`, of default/ci."),
        ({"org_id": "a"}, "Not imported: LiteLLM's `org_id`, of default/ci."),
        (
            {"max_budget": 5.0, "budget_duration": "7d"},
            "These budgets count by calendar month now: default/ci (7d).",
        ),
        ({"max_budget": 5.0}, "by calendar month now: default/ci (never began anew)."),
        ({"max_budget": 5.0, "spend": 0.5}, "Budgets begin anew, whatever was spent: default/ci."),
        ({"max_budget": 5.0}, "Budgets count by `gateway.prices`; a model without a price costs nothing."),
        ({"models": ["qwen"]}, "Serve models by these names, as ids or aliases: 'qwen'."),
        ({"models": ["a:8b"]}, "as ids or aliases; else what follows the colon means an adapter: 'a:8b'."),
        ({"models": ["a:*"]}, "as ids or aliases; else what follows the colon means an adapter: 'a:*'."),
        ({"litellm_budget_table": {"model_max_budget": {"a": 1}}}, "`model_max_budget`, of default/ci."),
        ({"router_settings": {"a": 1}}, "LiteLLM's `router_settings`, of default/ci."),
        ({"models": ["openai/*"]}, "Patterns match no model: 'openai/*'."),
        ({"models": ["a\x1b[2J"]}, r"Serve models by these names, as ids or aliases: 'a\x1b[2J'."),
    ],
)
def test_what_is_other_than_before_is_said(key: Any, said: str):
    assert any(one.endswith(said) for one in notes(listed(key_alias="ci", **key)))


def test_what_a_team_loses_is_said_once_for_its_tenant():
    team = WEB | {
        "metadata": {"guardrails": ["a"]},
        "max_budget": 5.0,
        "budget_duration": "30d",
        "spend": 1.0,
    }
    values: dict[str, Any] = {}
    assert imported(values, {"keys": [listed(team_id="7d7f7a6c")]}, [team]).notes() == [
        "Not imported: LiteLLM's `guardrails`, of tenant Web.",
        "Budgets count by `gateway.prices`; a model without a price costs nothing.",
        "Budgets begin anew, whatever was spent: tenant Web.",
    ]
    assert imported(values, {"keys": [listed(team_id="7d7f7a6c")]}, [team]).notes() == []
    assert imported({}, {"keys": []}, [team]).notes() == []


def test_a_kind_is_said_once_and_names_some_of_many_keys():
    of_keys = [listed(n, key_alias=f"k{n}", metadata={"tags": ["a"]}) for n in range(30)]
    (note,) = imported({}, {"keys": of_keys}).notes()
    assert note.endswith("default/k18, default/k19 and 10 more.")


def test_limits_that_the_file_has_for_a_tenant_stay():
    values: dict[str, Any] = {"tenants": {"Web": {"weight": 2, "limits": {"tokens_per_minute": 7}}}}
    found = imported(values, {"keys": [listed(team_id="7d7f7a6c")]}, [WEB | {"tpm_limit": 9}])
    assert values["tenants"] == {"Web": {"weight": 2, "limits": {"tokens_per_minute": 7}}}
    joins = "The file had these tenants, and LiteLLM's teams or users of these names join them: Web."
    assert found.notes() == ["These tenants keep the limits that the file has: Web.", joins]
    del values["tenants"]["Web"]["limits"]
    found = imported(values, {"keys": [listed(1, team_id="7d7f7a6c")]}, [WEB | {"tpm_limit": 9}])
    assert values["tenants"] == {"Web": {"weight": 2, "limits": {"tokens_per_minute": 9}}}
    assert found.notes() == [joins]


def test_owners_that_join_a_tenant_of_the_file_are_said():
    own = {"tenant": "Web", "name": "own", "hash": hashed("a-key-of-the-file-before")}
    values: dict[str, Any] = {"keys": [own, own | {"tenant": "default"}]}
    answer = {"keys": [listed(0, team_id="7d7f7a6c"), listed(1, team_id="7d7f7a6c"), listed(2)]}
    (said,) = imported(values, answer, [WEB]).notes()
    assert said == "The file had these tenants, and LiteLLM's teams or users of these names join them: Web."
    assert imported(values, answer, [WEB]).notes() == []
    assert imported({}, answer, [WEB]).notes() == []


def test_an_answer_can_come_from_a_pipe(tmp_path: Path):
    os.mkfifo(pipe := tmp_path / "answer")
    answer = json.dumps({"keys": [listed(key_alias="caf\u00e9 \U0001f600")]})
    threading.Thread(target=pipe.write_text, args=[answer]).start()
    assert "keys added: 1," in keys("import", pipe, "--file", tmp_path / "keys.yaml")
    assert [one.name for one in load(tmp_path / "keys.yaml").keys] == ["caf"]


def test_limits_of_single_members_of_a_team_are_said_to_stay_behind():
    member = {"user_id": "ann", "litellm_budget_table": {"rpm_limit": 1}}
    key, team = (
        listed(key_alias="ci", team_id="7d7f7a6c", user_id="ann"),
        WEB | {"team_memberships": [member]},
    )
    assert notes(key, teams=[team]) == ["Not imported: limits of single members of teams: Web/ci."]
    assert notes(key | {"user_id": "bob"}, teams=[team]) == []


def test_keys_that_litellm_blocks_after_their_import_are_to_be_revoked():
    values: dict[str, Any] = {}
    imported(values, {"keys": [listed()]})
    (note,) = imported(values, {"keys": [listed(blocked=True)]}).notes()
    assert note == f"LiteLLM refuses these keys, which the file has; revoke them: {listed()['token'][:8]}."


def test_only_a_star_is_special_in_names_of_models():
    team = WEB | {"models": ["claude[1m]", "model[12]"]}
    key = listed(team_id="7d7f7a6c", models=["claude[1m]", "model1"])
    assert entry(key, teams=[team]) == {"models": ["claude[1m]"]}


@pytest.mark.parametrize("expires", ["9999-12-31T23:59:59-12:00", 1e18])
def test_a_key_may_end_after_the_last_year(expires: Any):
    assert entry(listed(expires=expires)) == {"expires": "9999-12-31T23:59:59+00:00"}


def test_pages_that_no_file_has_are_said():
    pages = [{"keys": [listed(n)], "total_count": 3} for n in range(2)]
    assert imported({}, *pages).notes() == [
        "Keys on pages of `/key/list` that no file has: 1; import these, too."
    ]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            {"error": {"message": "No token passed in"}},
            "0.json: lists no keys, teams or users; save the answers",
        ),
        ({"keys": ["ab" * 32]}, "does not say what the keys may do; save the answers"),
        ({"keys": [OF_EACH]}, "keys[0].token: is missing"),
        ({"keys": [listed(token=secret())]}, "keys[0].token: must be the SHA-256 of a key; remove entries"),
        ([listed(rpm_limit="many")], "keys[0].rpm_limit: is the text 'many'; must be a whole number"),
        ({"keys": [listed(models="qwen")]}, "keys[0].models: is the text 'qwen'; must be a list"),
        ({"keys": [listed(expires="soon")]}, "keys[0].expires: write a date"),
        ([{"team_alias": "Web"}], "teams[0].team_id: is missing"),
        ("<html>", "is not valid JSON"),
        ("5", "must be a mapping"),
    ],
)
def test_what_is_wrong_is_said_and_changes_nothing(tmp_path: Path, answer: Any, said: str):
    create(tmp_path / "keys.yaml")
    before = (tmp_path / "keys.yaml").read_bytes()
    printed = run(tmp_path, {"keys": [listed(7)]}, answer, code=2).replace("1.json", "0.json")
    assert said in printed
    assert secret() not in printed
    assert (tmp_path / "keys.yaml").read_bytes() == before
