"""The two lanes of `make test`: nothing is left out, and the last line counts what both said."""

import subprocess
from pathlib import Path

import pytest
from tests.conftest import TIERS
from tests.lanes import LANES, runs, script, shown, total

HERE = Path(__file__).parents[1]


def test_each_tier_is_in_one_lane() -> None:
    assert sorted([*(tier for lane in LANES for tier in lane), "ray"]) == sorted(TIERS)
    with_tests = {file.parent.name for file in HERE.rglob("test_*.py")}
    assert with_tests == set(TIERS)


def test_each_file_on_ray_is_in_one_run() -> None:
    (_, first), (_, second) = runs()
    assert len(first) > 5
    assert len(second) > 5
    files = [f"tests/ray/{file.name}" for file in (HERE / "ray").glob("test_*.py")]
    assert sorted(first + second) == sorted(files)


def test_a_lane_has_failed_when_one_of_its_runs_has(tmp_path: Path) -> None:
    (tmp_path / "test_good.py").write_text("def test(): pass")
    (tmp_path / "test_bad.py").write_text("def test(): assert False")
    good, bad = [str(tmp_path / "test_good.py")], [str(tmp_path / "test_bad.py")]
    for lane, status in (([good, good], 0), ([bad, good], 1), ([good, bad], 1)):
        done = subprocess.run(["sh", "-c", script(lane)], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stdout.count(" in ")) == (status, 2), done.stdout


def test_counts_of_both_lanes_are_one_line() -> None:
    one = "=== 2 failed, 1500 passed, 1 skipped, 9 warnings in 700.12s (0:11:40) ==="
    two = "=== 90 passed, 2 errors in 3.10s ==="
    assert total([one, two]) == "2 failed, 2 error, 1590 passed, 1 skipped"


def test_a_lane_that_broke_off_is_an_error() -> None:
    for closing in ("", "=== no tests ran in 0.02s ==="):
        assert total(["=== 3 passed in 1.00s ===", closing]) == "1 error, 3 passed"


def test_output_is_shown_and_its_closing_lines_found(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["tests/unit/test_a.py .\n", "===== 1 passed in 0.01s =====\n"]
    assert shown(lines, "a lane", 2) == ["===== 1 passed in 0.01s =====", ""]
    assert capsys.readouterr().out.endswith("".join(lines))
