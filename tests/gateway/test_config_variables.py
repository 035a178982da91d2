"""Variables with too few underscores: which are told of, and with which name."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config_variables import variables_without_effect
from gateway.reload import ConfigSource
from gateway.settings import Settings
from gateway.tenants import hash_key


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    path = tmp_path / "forebay.yaml"
    path.write_text(
        "server: {secret_env: FOREBAY_REDIS_URL}\n"
        "models: [{name: tiny, path: bundled}]\n"
        f'tenants: [{{id: acme, keys: [{{hash: "{hash_key("key")}"}}]}}]\n'
    )
    return ConfigSource(path, {"FOREBAY_REDIS_URL": "s" * 40}, {}).load().settings


def test_the_right_name_is_told(settings: Settings) -> None:
    meant = {
        "FOREBAY_DATABASE_URL": "FOREBAY_DATABASE__URL",
        "FOREBAY_LOG_LEVEL": "FOREBAY_SERVER__LOG_LEVEL",
        "FOREBAY_MODELS_0_MAX_CONTEXT": "FOREBAY_MODELS__0__MAX_CONTEXT",
        "FOREBAY_PORT": "FOREBAY_SERVER__PORT",
        "FOREBAY_SERVER_PORT": "FOREBAY_SERVER__PORT",
        "FOREBAY_SERVER_TLS_CERT": "FOREBAY_SERVER__TLS__CERT",
        "FOREBAY_TENANTS_0_LIMITS_RPM": "FOREBAY_TENANTS__0__LIMITS__RPM",
    }
    assert variables_without_effect(settings, dict.fromkeys(meant, "8123")) == meant


def test_what_is_no_settings_name_is_nobodys_mistake(settings: Settings) -> None:
    others = {
        "FOREBAY_": "1",
        "FOREBAY_0": "1",
        "FOREBAY_SERVER": "{}",
        "FOREBAY_SERVER__PORT": "8123",
        "FOREBAY_REDIS_URL": "the configuration names this one",
        "FOREBAY_STATE_DIR": "/state",
        "FOREBAY_CACHE_DIR": "/cache",
        "FOREBAY_NATIVE": "off",
        "FOREBAY_API_KEY": "key",
        "FOREBAY_ADMIN_KEY": "key",
        "SERVER_PORT": "8123",
        # what Kubernetes tells of services called forebay and forebay-server
        "FOREBAY_PORT": "tcp://10.0.0.1:8000",
        "FOREBAY_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "FOREBAY_PORT_8000_TCP_PROTO": "tcp",
        "FOREBAY_SERVICE_HOST": "10.0.0.1",
        "FOREBAY_SERVICE_PORT": "8000",
        "FOREBAY_SERVER_PORT": "tcp://10.0.0.1:8000",
        "FOREBAY_SERVER_SERVICE_PORT": "8000",
    }
    assert variables_without_effect(settings, others) == {}
