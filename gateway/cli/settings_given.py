"""Settings on a command line: `--set limits.rpm=600`, or a YAML file of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from gateway.cli import exit_codes
from gateway.cli.errors import CommandError
from gateway.config_file import read_yaml

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting as in the configuration file, such as limits.rpm=600; may be repeated.",
    ),
]
File = Annotated[
    Path | None, typer.Option("--file", "-f", help="A YAML file of settings; --set goes before.")
]


def given_settings(file: Path | None, settings: Sequence[str] | None) -> dict[str, Any]:
    """What both say together, as nested mappings. Raises ConfigError or CommandError."""
    tree = {} if file is None else read_yaml(file)
    for setting in settings or ():
        name, equals, text = setting.partition("=")
        keys = name.split(".")
        if not equals or not all(keys):
            raise _wrong("must be KEY=VALUE, such as limits.rpm=600")
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):
            raise _wrong(f"the value of {name} is no YAML") from None
        node = tree
        for key in keys[:-1]:
            inner = node.setdefault(key, {})
            if not isinstance(inner, dict):
                raise _wrong(f"{name} lies in something that has no settings in it")
            node = inner
        node[keys[-1]] = value
    try:
        json.dumps(tree, allow_nan=False)
    except (TypeError, ValueError):
        raise _wrong("a value is neither text nor a finite number: a date, say, or .nan") from None
    return tree


def _wrong(reason: str) -> CommandError:
    return CommandError(f"--set: {reason}", exit_code=exit_codes.USAGE)
