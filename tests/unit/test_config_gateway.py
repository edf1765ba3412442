"""GatewayConfig: its limits, and where its key comes from."""

import math

import pytest

from penstock.config import GatewayConfig, Settings
from penstock.errors import ConfigError


def test_it_listens_on_this_machine_only_by_default(monkeypatch):
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    config = GatewayConfig()
    assert (config.host, config.port, config.api_key) == ("127.0.0.1", None, None)


def test_the_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("PENSTOCK_API_KEY", "k1")
    key = GatewayConfig().api_key
    assert key is not None
    assert key.get_secret_value() == "k1"


def test_a_given_key_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("PENSTOCK_API_KEY", "k1")
    key = GatewayConfig(api_key="k2").api_key
    assert key is not None
    assert key.get_secret_value() == "k2"


def test_an_empty_key_is_refused():
    with pytest.raises(ConfigError, match="api_key: "):
        GatewayConfig(api_key="")


@pytest.mark.parametrize("key", [" ", " k2", "k2\n", "k\x01"])
def test_a_key_that_no_client_can_send_is_refused_wherever_it_comes_from(key: str, monkeypatch):
    with pytest.raises(ConfigError, match="api_key: is nothing that a client can send") as caught:
        GatewayConfig(api_key=key)
    assert repr(key) not in str(caught.value)
    monkeypatch.setenv("PENSTOCK_ADMIN_KEY", key)
    with pytest.raises(ConfigError, match="PENSTOCK_ADMIN_KEY: is nothing"):
        GatewayConfig()


def test_clients_are_no_administrators():
    with pytest.raises(ConfigError, match="admin_key must differ"):
        GatewayConfig(api_key="k", admin_key="k")


def test_the_key_is_not_shown():
    config = GatewayConfig(api_key="k2-secret")
    assert "k2-secret" not in repr(config) + str(config)


def test_a_fault_in_the_key_does_not_show_it():
    with pytest.raises(ConfigError) as caught:
        GatewayConfig(api_key=12345)
    assert "api_key: " in str(caught.value)
    assert "12345" not in str(caught.value)


def test_all_faults_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        GatewayConfig(port=99999, log_format="jsn", request_timeout_s=0)
    assert [text.partition(": ")[0] for text in caught.value.problems] == [
        "port",
        "request_timeout_s",
        "log_format",
    ]


@pytest.mark.parametrize(
    "url",
    [
        "http://[::1/",
        "http://a..b/hook",
        "http://h:99999/",
        "http://x y/",
        "http://h:abc/",
        "ftp://h/",
        "http://",
    ],
)
def test_a_webhook_to_which_nothing_can_be_sent_is_refused(url: str):
    with pytest.raises(ConfigError, match="webhook: must be a URL"):
        GatewayConfig.parse({"webhook": url, "keys_file": "keys.yaml"})
    GatewayConfig.parse({"webhook": "http://[::1]:80/hook", "keys_file": "keys.yaml"})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("pk_secret", "keys: is a text; must be a list"),
        (["pk_secret"], "keys[0]: is a text; must be a mapping"),
    ],
)
def test_a_key_in_place_of_an_entry_is_not_shown(keys: object, said: str):
    """What is wrong with a file that is followed goes into the audit log, for ever."""
    with pytest.raises(ConfigError) as caught:
        GatewayConfig.parse({"keys": keys})
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("secret", ["whsec_", "whsec_!!!"])
def test_a_secret_that_signs_nothing_is_refused(secret: str, monkeypatch):
    monkeypatch.setenv("PENSTOCK_WEBHOOK_SECRET", secret)
    with pytest.raises(ConfigError, match="PENSTOCK_WEBHOOK_SECRET: must have base64"):
        Settings.read()


@pytest.mark.parametrize("name", ["search\n", "a b", "", "-a", 65 * "a"])
def test_a_name_is_one_from_its_first_character_to_its_last(name: str):
    with pytest.raises(ConfigError, match="must be at most 64 letters"):
        GatewayConfig.parse({"keys": [{"tenant": name, "name": "n", "hash": f"sha256:{64 * '0'}"}]})


@pytest.mark.parametrize("config", [{"prices": {"m": {"input": math.inf}}}, {"request_timeout_s": math.inf}])
def test_numbers_are_finite(config):
    with pytest.raises(ConfigError, match="must be a finite number"):
        GatewayConfig.parse(config)
