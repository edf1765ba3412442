"""A model more, or one less, in a fleet's file: what a person wrote stays."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.client.fleet import FleetChange
from penstock.cli.serve.fleet_models import _apply, _fleet, _without, _write
from penstock.config.fleet.document import read
from penstock.config.fleet.file_text import with_model, without_model
from penstock.errors import ConfigError

FIRST = """\
# Our models.
llm_configs:
- model_loading_config: {model_id: a}  # the small one
  aliases:
  - x
"""
SECOND = """\
-
  # the large one
  model_loading_config:
    model_id: b
    model_source: |
      ./b
"""
REST = """\

# For everyone.
gateway: {port: 9000}
"""
ADDED = """\
- model_loading_config:
    model_id: c
"""
ENTRY = {"model_loading_config": {"model_id": "c"}}


@pytest.mark.parametrize("rest", ["", REST])
@pytest.mark.parametrize("models", [FIRST, FIRST + SECOND])
def test_a_model_is_added_at_the_end(models: str, rest: str):
    assert with_model(models + rest, ENTRY) == models + ADDED + rest
    assert with_model((models + rest).removesuffix("\n"), ENTRY) == models + ADDED + rest


def test_it_is_indented_as_the_others():
    text = "llm_configs:\n    - m.yaml\n"
    assert with_model(text, ENTRY) == text + "    - model_loading_config:\n        model_id: c\n"


def test_a_model_is_removed_with_its_lines():
    assert without_model(FIRST + SECOND + REST, 1) == FIRST + REST
    assert without_model(FIRST + SECOND + REST, 0) == FIRST[: FIRST.index("- ")] + SECOND + REST


@pytest.mark.parametrize(
    "text",
    [
        "model_loading_config: {model_id: a}\n",
        "- a.yaml\n",
        "llm_configs: [a.yaml, b.yaml]\n",
        "llm_configs:\n- &a {model_loading_config: {model_id: a}}\n- b.yaml\nllm_config: *a\n",
    ],
    ids=["one model", "a list", "brackets", "an anchor"],
)
def test_another_form_is_refused(text: str):
    with pytest.raises(ConfigError, match="`llm_configs`"):
        without_model(text, 0)


def test_the_last_model_is_not_removed():
    with pytest.raises(ConfigError, match="needs at least one model"):
        without_model(FIRST + REST, 0)


@pytest.mark.parametrize("end", ["\r\n", "\x85"])
def test_lines_keep_their_ends(end: str):
    text = (FIRST + SECOND).replace("\n", end)
    assert without_model(text, 1) == FIRST.replace("\n", end)
    assert with_model(text, ENTRY) == text + (ADDED.replace("\n", end) if end == "\r\n" else ADDED)


def test_a_file_that_was_edited_meanwhile_is_written_where_it_means_the_same(tmp_path: Path):
    file, edit = tmp_path / "fleet.yaml", partial(with_model, entry=ENTRY)
    fleet = _fleet(edit(FIRST), file)
    file.write_text(f"# More.\n{FIRST}")
    file.chmod(0o640)
    _write(file, FIRST, edit(FIRST), edit, fleet)
    assert (file.read_text(), file.stat().st_mode & 0o777) == (f"# More.\n{FIRST}{ADDED}", 0o640)
    file.write_text(FIRST + ADDED.replace("id: c", "id: d"))
    with pytest.raises(ConfigError, match="other changes"):
        _write(file, FIRST, edit(FIRST), edit, fleet)
    assert [one.name for one in tmp_path.iterdir()] == ["fleet.yaml"]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_gets_a_model_only_when_it_is_known_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_there: bool
):
    class Service(FleetChange):
        def ask(self, method: str, path: str, *_: Any, **__: Any) -> dict[str, Any]:
            nothing = dict.fromkeys(("models", "gateway", "restarts", "notes"), ())
            return {"version": 2, "is_empty": is_there, "gpus": (0, 0, 0), **nothing}

    file = tmp_path / "fleet.yaml"
    file.write_text(FIRST)
    assert _apply(Service("", None, wait=0.0), "c", file, partial(with_model, entry=ENTRY), "Add this.") == 0
    assert file.read_text() == (FIRST + ADDED if is_there else FIRST)
    assert ("nothing waits to see whether that succeeds. Add this." in capsys.readouterr().out) != is_there


def test_what_only_ray_serve_obeys_is_refused_and_not_dropped(tmp_path: Path):
    file = tmp_path / "serve.yaml"
    file.write_text(
        "http_options: {port: 9000}\napplications:\n- import_path: penstock.serve:build_openai_app\n"
        "  args: {llm_configs: [{model_loading_config: {model_id: m}}]}\n"
    )
    with pytest.raises(ConfigError, match=r"http_options.*only Ray Serve obeys it .* Leave it out\."):
        read(str(file))


def test_an_application_without_models_is_no_fleet(tmp_path: Path):
    file = tmp_path / "serve.yaml"
    file.write_text("applications:\n- import_path: penstock.serve:build_openai_app\n")
    with pytest.raises(ConfigError, match="has no applications with models"):
        read(str(file))


def test_a_model_is_not_removed_by_its_alias():
    with pytest.raises(ConfigError, match="'x' is an alias of the model 'a': name that one"):
        _without("x", None, FIRST + SECOND)
