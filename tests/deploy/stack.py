"""The stack's files as their programs would read them: compose.yaml merged and interpolated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gateway.reload import ConfigSource
from gateway.settings import Settings

ROOT = Path(__file__).parents[2]
PROFILES = ("cpu", "gpu")
"""What COMPOSE_PROFILES may be; unset is the first."""
IMAGES = ("forebay:cpu", "forebay:gpu")

_VARIABLE = re.compile(r"\$\{([A-Z][A-Z0-9_]*)(?:(:-|:\?)([^}]*))?\}|(\$)")


@dataclass(frozen=True, slots=True)
class Mount:
    """One entry of `volumes`; `source` is a path in the repository or a volume's name."""

    source: str
    target: str
    read_only: bool

    @property
    def file(self) -> Path | None:
        """What is mounted, None for a named volume."""
        return ROOT / self.source if self.source.startswith("./") else None


@cache
def text() -> str:
    """compose.yaml."""
    return (ROOT / "compose.yaml").read_text()


@cache
def compose(profile: str = PROFILES[0]) -> dict[str, Any]:
    """compose.yaml with its merge keys followed and its variables in place."""
    environ = {name: f"{name.lower()}-of-the-test" for name in required()}
    if profile != PROFILES[0]:
        environ["COMPOSE_PROFILES"] = profile
    tree = interpolated(yaml.safe_load(text()), environ)
    assert isinstance(tree, dict)
    return tree


def services(profile: str = PROFILES[0]) -> dict[str, dict[str, Any]]:
    """The services that run under a profile."""
    return {
        name: service
        for name, service in compose(profile)["services"].items()
        if profile in service.get("profiles", [profile])
    }


def variables() -> Iterator[tuple[str, str | None]]:
    """Every use of a variable outside comments: its name, and `:-` or `:?` if it has one."""
    for found in _VARIABLE.finditer(re.sub(r"(?m)^\s*#.*$", "", text())):
        assert found[4] is None, "a dollar sign that begins no ${VARIABLE}"
        yield found[1], found[2]


def required() -> set[str]:
    """The variables without which the stack does not start."""
    return {name for name, operator in variables() if operator == ":?"}


def interpolated(node: Any, environ: Mapping[str, str]) -> Any:
    """The tree with `${NAME}`, `${NAME:-default}` and `${NAME:?message}` replaced."""
    if isinstance(node, dict):
        return {key: interpolated(value, environ) for key, value in node.items()}
    if isinstance(node, list):
        return [interpolated(item, environ) for item in node]
    if not isinstance(node, str):
        return node
    return _VARIABLE.sub(lambda found: environ.get(found[1]) or found[3] or "", node)


def mounts(service: Mapping[str, Any]) -> list[Mount]:
    """Its `volumes`."""
    found = []
    for entry in service.get("volumes", []):
        source, target, *mode = entry.split(":")
        assert mode in ([], ["ro"]), entry
        found.append(Mount(source, target, mode == ["ro"]))
    return found


def in_repository(service: Mapping[str, Any], path: str) -> Path:
    """The repository's file that the service sees at `path`."""
    for mount in mounts(service):
        if mount.file is not None and (path + "/").startswith(mount.target + "/"):
            return mount.file / path.removeprefix(mount.target).lstrip("/")
    raise AssertionError(f"{path} is not mounted")


def is_forebay(service: Mapping[str, Any]) -> bool:
    """Whether it runs our image."""
    return service["image"] in IMAGES


def config_path(service: Mapping[str, Any]) -> Path:
    """The file that one of our services is started with."""
    flag, path = service["command"]
    assert flag == "--config"
    return in_repository(service, path)


@cache
def settings_of(name: str, profile: str) -> Settings:
    """What one of our services makes of its file and environment."""
    service = compose(profile)["services"][name]
    return ConfigSource(config_path(service), service["environment"], {}).load().settings


def seconds(duration: str) -> float:
    """`45s`, `1h` and the like, of compose and nginx."""
    found = re.fullmatch(r"(\d+)(ms|s|m|h)", duration)
    assert found, duration
    return int(found[1]) * {"ms": 1e-3, "s": 1, "m": 60, "h": 3600}[found[2]]
