"""As test_update, with as many replicas as before, and fewer; one gateway, and two."""

from collections.abc import Iterator

import pytest
from ray import serve
from tests.ray.updating import (
    APP,
    long_streams_move,
    no_request_is_lost,
    quick_changes_end_with_the_newest,
)

pytestmark = pytest.mark.full


@pytest.fixture
def url(serve_url: str, free_port: int) -> Iterator[str]:
    """Of an application of its own: that it is deployed again is the fact."""
    yield f"http://127.0.0.1:{free_port}"
    serve.delete(APP)


@pytest.mark.parametrize(("replicas", "gateways"), [((2, 2, 1), 1), ((1, 1), 2)])
async def test_no_request_is_lost_and_no_stream_broken(url: str, replicas: tuple[int, ...], gateways: int):
    await no_request_is_lost(url, replicas, gateways)


@pytest.mark.parity("X27")
def test_every_gateway_ends_with_the_newest_of_quick_changes(url: str):
    quick_changes_end_with_the_newest(url)


@pytest.mark.parity("X4")
async def test_an_update_moves_streams_and_waits_for_none(url: str):
    await long_streams_move(url)
