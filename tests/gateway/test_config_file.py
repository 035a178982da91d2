"""Reading YAML: what is refused before any key is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config_file import load_settings, read_yaml
from gateway.settings_errors import ConfigError


def said(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    [message] = caught.value.messages
    assert "\n" not in message
    return message.replace(f"{path}", "FILE")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert said(tmp_path / "x.yaml") == "FILE: no such file"


def test_a_directory_is_named(tmp_path: Path) -> None:
    assert said(tmp_path).startswith("FILE: cannot be read")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [1", "FILE:1:6: expected ',' or ']'"),
        (b"server:\n  port: 1\n  port: 2\n", "FILE:3:3: port is given twice"),
        (b"server: {}\nserver: {}\n", "FILE:2:1: server is given twice"),
        (b"- 1\n", "FILE: must be a mapping"),
        (b"", "FILE: must be a mapping"),
        (b"\xff\xfe\x00", "FILE: is not UTF-8 text"),
        (b"a: \x01", "FILE: has characters that YAML does not allow"),
        (b"a: !!python/object/apply:os.system [id]", "FILE:1:4: could not determine a constructor"),
        (b"a: *sk-secret", "FILE:1:4: found undefined alias (...)"),
        (b"[" * 5000, "FILE: is nested too deeply"),
        (b"? [1]\n: 2\n? [1]\n: 3\n", "FILE:1:3: found unhashable key"),
        (b"a:\n\tb: 1\n", "FILE:2:1: a tab; YAML is indented by spaces"),
        (
            b"a:\n  b: 1\n c: 2\n",
            "FILE:3:2: expected <block end>, but found '<block mapping start>' "
            "(look at the indentation)",
        ),
        (b"a: 2024-99-99", "FILE: has a value that is none of its type"),
        (b"a: !!int sk-secret", "FILE: has a value that is none of its type"),
    ],
)
def test_broken_files_are_refused_with_a_place(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_bytes(content)
    assert said(path).startswith(message)


def test_a_secret_used_as_a_key_twice_is_not_echoed(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text("sk-abc123: 1\nsk-abc123: 2\n")
    assert "sk-abc" not in said(path)


def test_merge_keys_work(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text("base: &b {a: 1}\nmodels: [{<<: *b, c: 2}]\n")
    assert read_yaml(path)["models"] == [{"a": 1, "c": 2}]


def test_relative_paths_are_the_files_own(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text(
        "models: [{path: m.gguf}, {path: bundled}, {path: /abs}]\n"
        "server: {tls: {cert: c.pem, key: /k.pem}}\n"
        "redis: {tls_ca: ca.pem}\n"
        "shared_prefixes: [{file: p.txt}, {text: p.txt}, x]\n"
    )
    tree = read_yaml(path)
    base = tmp_path.resolve()
    assert [model["path"] for model in tree["models"]] == [f"{base}/m.gguf", "bundled", "/abs"]
    assert tree["server"]["tls"] == {"cert": f"{base}/c.pem", "key": "/k.pem"}
    assert tree["redis"]["tls_ca"] == f"{base}/ca.pem"
    assert tree["shared_prefixes"] == [{"file": f"{base}/p.txt"}, {"text": "p.txt"}, "x"]


def test_a_home_directory_that_is_not_known_is_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "forebay.yaml"
    path.write_text("models: [{name: m, path: ~nobody-of-this-name/m}]\ntenants: [{id: t}]\n")
    for flags in ({}, {"--model": "~nobody-of-this-name/m"}):
        with pytest.raises(ConfigError, match=r"no such file or directory: .*~nobody-of-this"):
            load_settings(path, {}, flags)
