"""The cache of recipes: a model is made once, by one process, and anew when its recipe has changed."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recipes import shelf

RECIPE = '''"""Makes a file."""
from recipes.shared import WORD

def make(out):
    (out / "word").write_text(WORD)
    with open({log!r}, "a") as log:
        log.write("made\\n")
    return "All right."
'''
FAILS = """from recipes import NotLearned

def make(out):
    (out / "half").touch()
    raise NotLearned("Asked for red, it said blue.")
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Recipes of this test's own; a line is written for each model that is made."""
    package = tmp_path / "recipes"
    (package / "word").mkdir(parents=True)
    (package / "bad").mkdir()
    (package / "__init__.py").write_text((shelf.RECIPES / "__init__.py").read_text())
    (package / "shared.py").write_text("WORD = 'one'")
    (package / "word" / "recipe.py").write_text(RECIPE.format(log=str(tmp_path / "log")))
    (package / "bad" / "recipe.py").write_text(FAILS)
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


def test_the_exam_and_the_seconds_are_told(log: Path):
    assert shelf.exam("word") is None
    shelf.made("word")
    assert (shelf.exam("word") or "").startswith("All right. Made in ")


def test_a_failed_exam_leaves_no_model_and_says_why(log: Path):
    for _ in range(2):
        with pytest.raises(shelf.RecipeFailed, match=r"'bad' failed(?s:.*)said blue"):
            shelf.made("bad")
    assert [file.suffix for file in shelf.CACHE.iterdir()] == [".lock"]


def test_an_unknown_recipe_names_the_known_ones(log: Path):
    with pytest.raises(shelf.RecipeFailed, match="no recipe 'wrod'; there are bad, word"):
        shelf.made("wrod")
