"""The fixture `patched`."""

import os

import pytest
from tests import conftest


@pytest.mark.parametrize("name", ["getpid", "getppid"])
def test_a_function_that_is_put_in_place_has_to_be_called(monkeypatch: pytest.MonkeyPatch, name: str):
    using = conftest.patched._get_wrapped_function()(monkeypatch)
    next(using)(os, name, lambda: 7)
    assert os.getpid() == 7 or name == "getppid"
    with pytest.raises(StopIteration if name == "getpid" else AssertionError):
        next(using)
