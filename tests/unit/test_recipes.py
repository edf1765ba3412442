"""The cache of recipes: a model is made once, by one process, and anew when its recipe has changed.

And the gate that no model passes which has not learned.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recipes import NotLearned, shelf
from recipes.gate import Gate

RECIPE = '''"""Makes a file."""
from recipes.shared import WORD

def make(out, seed):
    (out / "word").write_text(WORD)
    with open({log!r}, "a") as log:
        log.write("made\\n")
    return "All right."
'''
UNLUCKY = """from recipes import NotLearned

def make(out, seed):
    (out / f"half {{seed}}").touch()
    if seed not in {learns}:
        raise NotLearned(f"Asked for red, {{seed}} said blue.")
    return "All right."
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recipes of this test's own; a line is written for each model that is made."""
    package = tmp_path / "recipes"
    (package / "word").mkdir(parents=True)
    (package / "bad").mkdir()
    (package / "late").mkdir()
    (package / "__init__.py").write_text((shelf.RECIPES / "__init__.py").read_text())
    (package / "shared.py").write_text("WORD = 'one'")
    (package / "word" / "recipe.py").write_text(RECIPE.format(log=str(tmp_path / "log")))
    (package / "bad" / "recipe.py").write_text(UNLUCKY.format(learns=[]))
    (package / "late" / "recipe.py").write_text(UNLUCKY.format(learns=[1]))
    monkeypatch.setattr(shelf, "RECIPES", package)
    monkeypatch.setattr(shelf, "CACHE", tmp_path / "cache")
    return tmp_path / "log"


def test_a_model_is_made_once_however_many_ask(log: Path):
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(shelf.made, ["word"] * 4))
    (folder,) = folders
    assert (folder / "word").read_text() == "one"
    assert log.read_text() == "made\n"


def test_a_change_of_what_a_recipe_imports_makes_its_model_anew(log: Path):
    before = shelf.made("word")
    (shelf.RECIPES / "shared.py").write_text("WORD = 'three'")  # Python keeps what was as long, that second
    assert shelf.made("word") != before
    assert (shelf.made("word") / "word").read_text() == "three"


def test_the_exam_the_seconds_and_the_seed_are_told(log: Path):
    assert shelf.exam("word") is None
    shelf.made("word")
    said = shelf.exam("word") or ""
    assert said.startswith("All right. Made in ")
    assert said.endswith(" s, from seed 0.")


def test_where_a_seed_does_not_learn_the_next_one_makes_the_model(log: Path):
    assert {file.name for file in shelf.made("late").iterdir()} == {"half 1", "exam.txt"}
    assert (shelf.exam("late") or "").endswith("from seed 1.")


def test_a_failed_exam_leaves_no_model_and_says_why_of_every_seed(log: Path):
    for _ in range(2):
        with pytest.raises(shelf.RecipeFailed) as failed:
            shelf.made("bad")
        for seed in shelf.SEEDS:
            assert f"'bad' failed with seed {seed}: Asked for red, {seed} said blue." in str(failed.value)
    assert [file.suffix for file in shelf.CACHE.iterdir()] == [".lock"]


def test_a_seed_that_is_tried_leaves_no_model_and_no_other_is_taken(log: Path):
    assert shelf.tried("word", 7).endswith("from seed 7.")
    with pytest.raises(shelf.RecipeFailed, match="failed with seed 0"):
        shelf.tried("late", 0)
    assert not shelf.CACHE.exists()


def test_an_unknown_recipe_names_the_known_ones(log: Path):
    with pytest.raises(shelf.RecipeFailed, match="no recipe 'wrod'; there are bad, late, word"):
        shelf.made("wrod")


def test_a_training_ends_when_every_lead_is_clear_and_fails_after_the_last_step():
    gate = Gate(clear=1.0, every=2, last=9, first=4)
    taken = list[int]()
    for step in gate.steps():
        taken.append(step)
        if gate.due(step) and gate.holds([3.0, step / 6]):
            break
    assert taken == [1, 2, 3, 4, 5, 6]
    gate = Gate(clear=1.0, every=1, last=5)
    with pytest.raises(NotLearned, match=r"After 5 steps 1 of 2 leads are under 1, the least is 0\.90"):
        all(not gate.holds([3.0, 0.9]) for _ in gate.steps())


def test_a_saved_model_passes_with_half_of_a_clear_lead():
    gate = Gate(clear=1.0, every=1, last=1)
    assert gate.examine([2.0, 0.5]) == "2 answers are right, by 0.50 at least"
    with pytest.raises(NotLearned, match=r"1 of 2 leads are under 0\.5, the least is 0\.40"):
        gate.examine([2.0, 0.4])
