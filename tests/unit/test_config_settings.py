"""The environment: known names only, each readable."""

import pytest

from penstock.config import Settings
from penstock.errors import ConfigError


def test_an_empty_environment_is_all_defaults():
    settings = Settings.read({})
    assert (settings.accelerator, settings.api_key, settings.engine_cls) == ("auto", None, None)


def test_other_names_are_none_of_ours():
    assert Settings.read({"PATH": "/bin", "VLLM_X": "1"}) == Settings.read({})


def test_values_are_read():
    settings = Settings.read({"PENSTOCK_ACCELERATOR": "cpu", "PENSTOCK_ENGINE_CLS": "a:B"})
    assert (settings.accelerator, settings.engine_cls) == ("cpu", "a:B")


def test_an_empty_key_is_no_key():
    assert Settings.read({"PENSTOCK_API_KEY": ""}).api_key is None


def test_unknown_names_and_unreadable_values_are_told_together():
    with pytest.raises(ConfigError) as caught:
        Settings.read({"PENSTOCK_ACELERATOR": "cpu", "PENSTOCK_ACCELERATOR": "tpu"})
    assert {text.partition(": ")[0] for text in caught.value.problems} == {
        "PENSTOCK_ACELERATOR",
        "PENSTOCK_ACCELERATOR",
    }


def test_the_key_is_not_shown():
    assert "k1" not in repr(Settings.read({"PENSTOCK_API_KEY": "k1"}))
