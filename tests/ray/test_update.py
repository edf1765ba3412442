"""A fleet is deployed anew under load: whoever asks meanwhile notices nothing. More in test_update_more."""

from collections.abc import Iterator

import pytest
from ray import serve
from tests.ray.updating import APP, no_request_is_lost


@pytest.fixture
def url(serve_url: str, free_port: int) -> Iterator[str]:
    """Of an application of its own: that it is deployed again is the fact."""
    yield f"http://127.0.0.1:{free_port}"
    serve.delete(APP)


async def test_no_request_is_lost_and_no_stream_broken(url: str):
    await no_request_is_lost(url, (2, 1), gateways=2)
