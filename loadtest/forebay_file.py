"""How forebay is started with a configuration file of somebody's, to be measured."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from loadtest.bench.campaign import CampaignError
from loadtest.forebay_server import KEY_VARIABLE

_OWN_TENANT = "loadtest"
_TENANTS_VARIABLES = "FOREBAY_TENANTS"


class Start(NamedTuple):
    """What `running_forebay` is given: variables to set, and flags."""

    settings: dict[str, str]
    flags: tuple[str, ...]


def read_start(path: Path) -> Start:
    """The file as it is and where it is, for the paths in it are relative to it, with a tenant
    more, whose key is the one that is measured with.

    Raises CampaignError for a file that cannot be read or is no YAML, and if a tenant's key is to
    be in a variable that is not set.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise CampaignError(f"{path}: cannot be read ({why})") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        # Its own words quote the file, which may hold secrets.
        raise CampaignError(f"{path}: is no valid YAML; `forebay check` says where") from None
    # Whatever else is wrong with the file, forebay says when it starts.
    tenants = tree.get("tenants") if isinstance(tree, dict) else None
    tenants = tenants if isinstance(tenants, list) else []
    flags = ("--config", str(path.absolute()))  # the last one given counts
    known = [tenant for tenant in tenants if isinstance(tenant, dict)]
    variables = [variable for tenant in known for variable in _key_variables(tenant)]
    if unset := _unset(variables, os.environ):
        raise CampaignError("\n".join(f"{path}: {each} is not set" for each in unset))
    if KEY_VARIABLE in variables:
        return Start({}, flags)
    name = _OWN_TENANT
    while any(tenant.get("id") == name for tenant in known):
        name += "-client"
    added = f"FOREBAY_TENANTS__{len(tenants)}"
    return Start({f"{added}__ID": name, f"{added}__KEYS": f"[{{env: {KEY_VARIABLE}}}]"}, flags)


def _key_variables(tenant: dict[str, Any]) -> Iterator[str]:
    keys = tenant.get("keys")
    for key in keys if isinstance(keys, list) else ():
        if isinstance(key, dict) and isinstance(key.get("env"), str):
            yield key["env"]


def _unset(variables: list[str], environ: Mapping[str, str]) -> list[str]:
    """Those without which forebay would not start. Variables can replace the tenants of a file,
    and then it is not known here which keys count."""
    if any(name.startswith(_TENANTS_VARIABLES) for name in environ):
        return []
    return [
        each
        for each in dict.fromkeys(variables)
        if each != KEY_VARIABLE and not environ.get(each, "").strip()
    ]
