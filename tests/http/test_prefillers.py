"""A decode replica's way to the prefill replicas of its model, over real sockets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from served import NODE, Served, sim_config, until

from penstock.config.disaggregation import PrefillConfig
from penstock.serve import membership
from penstock.serve.prefilling import Prefillers

pytestmark = pytest.mark.parity("S24")

BODY = b'{"model": "m", "prompt": "a long one", "max_tokens": 1}'
SCOPE: dict[str, Any] = {"path": "/v1/completions", "headers": []}


async def test_an_answer_is_taken_where_the_weights_are_the_same(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    seen: list[Any] = []
    monkeypatch.setattr(membership, "follow", lambda model, handle, tell: seen.append(tell))
    weights = "default"
    engine = await served.replica(join=False)
    config = sim_config("m").model_copy(update={"prefill": PrefillConfig()})
    halves = Prefillers(config, SimpleNamespace(), engine.engine.app(), lambda: weights, NODE)
    await halves.start()
    try:
        assert await halves.ask(SCOPE, BODY) is None, "there is none"
        seen[0]({engine.address.replica_id: engine.address})
        await until(lambda: halves._table.ready("m"))
        assert b"text_completion" in (await halves.ask(SCOPE, BODY) or b"")
        weights = "other"
        assert await halves.ask(SCOPE, BODY) is None, "its cache fits no longer"
    finally:
        await halves.close()
