"""The documents' configs run on CPU, though the shared cluster claims GPUs."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_ACCELERATOR", "cpu")
        yield
