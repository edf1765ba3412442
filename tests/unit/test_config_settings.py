"""The environment: known names only, each readable."""

from pathlib import Path

import pytest
from pydantic import SecretStr
from tests.kubernetes import service_variables

from penstock.config import Settings
from penstock.errors import ConfigError
from penstock.serve.tenancy.store import usage_file


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


def test_the_key_of_vllm_serve_is_the_gateways_where_it_has_no_other():
    assert Settings.read({"VLLM_API_KEY": "v", "PENSTOCK_API_KEY": ""}).api_key == SecretStr("v")
    assert Settings.read({"VLLM_API_KEY": "v", "PENSTOCK_API_KEY": "p"}).api_key == SecretStr("p")


def test_unknown_names_and_unreadable_values_are_told_together():
    with pytest.raises(ConfigError) as caught:
        Settings.read({"PENSTOCK_ACELERATOR": "cpu", "PENSTOCK_ACCELERATOR": "tpu"})
    assert {text.partition(": ")[0] for text in caught.value.problems} == {
        "PENSTOCK_ACELERATOR",
        "PENSTOCK_ACCELERATOR",
    }


@pytest.mark.parametrize("service", ["PENSTOCK", "PENSTOCK_CACHE", "PENSTOCK_MY_GATEWAY"])
def test_a_kubernetes_service_of_our_name_changes_nothing(service, caplog):
    """Kubernetes sets such variables in every pod of the namespace."""
    assert Settings.read(service_variables(service)) == Settings.read({})
    assert caplog.text == ""


def test_an_unknown_name_like_none_of_ours_is_a_warning_said_once(caplog):
    for _ in range(2):
        assert Settings.read({"PENSTOCK_FLAVOUR": "mint"}) == Settings.read({})
    assert caplog.text.count("PENSTOCK_FLAVOUR has no effect") == 1


def test_the_key_is_not_shown():
    assert "k1" not in repr(Settings.read({"PENSTOCK_API_KEY": "k1"}))


def test_nodes_are_fixed_unless_the_cluster_is_said_to_grow():
    assert Settings.read({}).cluster == "fixed"
    assert Settings.read({"PENSTOCK_CLUSTER": "growing"}).cluster == "growing"


def test_the_home_of_nobody_is_a_folder_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_CACHE", "~nobody-of-this-name/cache")
    monkeypatch.setenv("PENSTOCK_USAGE", "~nobody-of-this-name/usage")
    assert Settings.read().cache_folder() == Path("~nobody-of-this-name/cache")
    assert usage_file("app", None).parent == Path("~nobody-of-this-name/usage")
