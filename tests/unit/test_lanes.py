"""The two lanes of `make test`: nothing is left out, and the last line counts what both said."""

from pathlib import Path

import pytest
from tests.conftest import TIERS
from tests.lanes import LANES, shown, total

HERE = Path(__file__).parents[1]


def test_each_tier_is_in_one_lane() -> None:
    assert sorted(tier for lane in LANES for tier in lane) == sorted(TIERS)
    with_tests = {file.parent.name for file in HERE.rglob("test_*.py")}
    assert with_tests == set(TIERS)


def test_counts_of_both_lanes_are_one_line() -> None:
    one = "=== 2 failed, 1500 passed, 1 skipped, 9 warnings in 700.12s (0:11:40) ==="
    two = "=== 90 passed, 2 errors in 3.10s ==="
    assert total([one, two]) == "2 failed, 2 error, 1590 passed, 1 skipped"


def test_a_lane_that_broke_off_is_an_error() -> None:
    for closing in ("", "=== no tests ran in 0.02s ==="):
        assert total(["=== 3 passed in 1.00s ===", closing]) == "1 error, 3 passed"


def test_output_is_shown_and_its_closing_line_found(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["tests/unit/test_a.py .\n", "===== 1 passed in 0.01s =====\n"]
    assert shown(lines, ["tests/unit"]) == "===== 1 passed in 0.01s ====="
    assert capsys.readouterr().out.endswith("".join(lines))
