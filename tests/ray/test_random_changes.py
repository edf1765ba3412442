"""A fleet under load is changed at random: it ends as its file says, no request fails, and nothing restarts
that need not. More in test_random_changes_more. A service of its own: its processes are counted.
"""

import random
from pathlib import Path

import pytest
from tests.ray.changing import ALL, random_changes

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.mark.parity("X27")
def test_a_changed_fleet_is_its_file_and_loses_no_request(tmp_path: Path):
    kinds = random.Random(1).sample(["faulty", *ALL], len(ALL) + 1)
    ends = random_changes(tmp_path, kinds, ["", "LLMControl", "", "", "LLMRouter", *5 * [""]], seed=1)
    assert ends[""] > 50
