"""As test_random_changes, with fifty changes of every kind; control, a gateway or an engine is killed."""

import os
import random
from pathlib import Path

import pytest
from tests.ray.changing import ALL, LIVE, SERVER, SPECIAL, random_changes

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
SEED = int(os.environ.get("CHANGES_SEED", "2"))


@pytest.mark.parity("X27")
def test_fifty_changes_end_as_the_file_says_and_lose_no_request(tmp_path: Path):
    rng = random.Random(SEED)
    kinds = [*ALL, *SPECIAL, *rng.choices([*ALL, *SPECIAL], k=50 - len(ALL) - len(SPECIAL))]
    rng.shuffle(kinds)
    killed = {kind: ["", "LLMControl", "LLMRouter"] for kind in kinds}
    killed |= {kind: [*killed[kind], SERVER] for kind in LIVE}  # others may leave no replica to go on at
    victims = [rng.choice(killed[kind]) for kind in kinds]
    ends = random_changes(tmp_path, kinds, victims, SEED)
    assert ends[""] > 500
    assert ends["cut"] > 0
    assert ends["other"] > 0
