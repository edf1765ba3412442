"""The batch programs of examples/ run as they are, and what they print makes sense.

With real engines; in the fast tier the first of them, the others with a simulator of the demo model.
"""

import runpy
from pathlib import Path

import pytest
import ray
from tests.models import model

from recipes.vision.pictures import draw

EXAMPLES = Path(__file__).parents[2] / "examples"
SENSE = "engines"  # whatever the embedded model is asked about Penstock, it speaks of engines

pytestmark = pytest.mark.usefixtures("serve_url")


def printed(program: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    ray.data.DataContext.get_current().enable_progress_bars = False
    capsys.readouterr()
    runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.mark.parity("D1", "D2")
def test_batch(capsys):
    lines = printed("batch.py", capsys)
    terms = {line.partition(" - ")[0]: line for line in lines if " - " in line}
    assert terms.keys() == {"Penstock", "a KV cache", "prefill"}
    assert SENSE in terms["Penstock"]


@pytest.mark.parity("D2")
def test_two_models_after_one_another(simulated, capsys):
    lines = [line for line in printed("batch_stages.py", capsys) if line.startswith("{")]
    assert len(lines) == 2
    assert sum(SENSE in line for line in lines) == 1


@pytest.mark.parity("D9")
def test_pictures_are_fetched_made_smaller_and_named(simulated, capsys, monkeypatch, tmp_path):
    for colour, shape in (("green", "triangle"), ("red", "circle")):
        draw(colour, shape).save(tmp_path / f"{colour}.png")
    monkeypatch.setenv("PICTURES", str(tmp_path))
    monkeypatch.setenv("VISION_MODEL", str(model("vision")))
    lines = [line.rpartition("/")[2] for line in printed("batch_vision.py", capsys) if ".png" in line]
    seen = ["What is this?"] * 2 if simulated else ["a green triangle", "a red circle"]
    assert sorted(lines) == [f"green.png - {seen[0]}", f"red.png - {seen[1]}"]


@pytest.mark.parity("X20")
def test_programs_of_several_turns(simulated, capsys):
    lines = [line for line in printed("batch_programs.py", capsys) if "after 3 calls" in line]
    assert sorted(line.partition(" - ")[0] for line in lines) == ["Penstock", "a KV cache"]
