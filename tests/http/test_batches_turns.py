"""Many batches at once over a gateway: none holds up the others, and turns run no line twice."""

import pytest
from jobs_served import JobsServed, begun, create, ended, found, line

pytestmark = [pytest.mark.full, pytest.mark.parity("X2")]

LONG = " ".join(f"word{number}" for number in range(200))


async def test_a_small_batch_is_not_held_up_by_four_large_ones(jobs: JobsServed):
    jobs.service.turns._slice_s = 0.5
    large = [
        await create(jobs, [line(f"{row}", f"{number} {row} {LONG}", max_tokens=50) for row in range(400)])
        for number in range(4)
    ]
    for one in large:
        await begun(jobs, one.id)
    small = await ended(jobs, (await create(jobs, [line("a")])).id)
    assert small.status == "completed"
    client = jobs.openai()
    assert {(await client.batches.retrieve(one.id)).status for one in large} == {"in_progress"}
    for one in large:
        await client.batches.cancel(one.id)
    for one in large:
        batch = await ended(jobs, one.id)
        done, left = await found(jobs, batch.output_file_id), await found(jobs, batch.error_file_id)
        assert sorted(answer["custom_id"] for answer in done + left) == sorted(map(str, range(400)))
    assert max(jobs.requests.sent.values()) == 1, "a turn's running requests end before it does"


async def test_batches_that_take_turns_all_complete(jobs: JobsServed):
    jobs.service.turns._slice_s = 0.1
    made = [
        await create(jobs, [line(f"{row}", f"{number} {row} {LONG}", max_tokens=20) for row in range(40)])
        for number in range(6)
    ]
    for one in made:
        batch = await ended(jobs, one.id)
        assert batch.status == "completed"
        assert len(await found(jobs, batch.output_file_id)) == 40
    assert set(jobs.requests.sent.values()) == {1}
