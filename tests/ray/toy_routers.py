"""Routers of Ray Serve's kind, as users write them: tests name them by class or by path."""

from __future__ import annotations

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


class ByFirstWord(FIFOMixin, RequestRouter):
    """Prompts of one first word go to one replica: the words in `order`, to the replicas by their ids."""

    def initialize_state(self, order: str = "") -> None:
        self.order = order.split()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        by_id = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        if pending_request is None or not pending_request.args:
            return [by_id]
        word = pending_request.args[0].prompt.split()[0]
        return [[by_id[self.order.index(word)]]]


class Broken(FIFOMixin, RequestRouter):
    """Fails on each request."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None and pending_request.args:
            raise ValueError("it cannot choose")
        return [candidate_replicas]
