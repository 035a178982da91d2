"""What can be told of a configuration's tree before it is known to be right.

Whatever is not of the shape that is looked for is passed over: validation says that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.settings_errors import Path, dotted


def items_at(tree: object, *path: str | int) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Those of a list's items that are mappings, each with its index."""
    items = value_at(tree, *path)
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict):
            yield index, item


def value_at(tree: object, *path: str | int) -> object:
    """What lies at a path, None if nothing does."""
    for part in path:
        if isinstance(part, str) and isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(part, int) and isinstance(tree, list) and 0 <= part < len(tree):
            tree = tree[part]
        else:
            return None
    return tree


def unset_keys(tree: object, environ: Mapping[str, str]) -> list[tuple[Path, str]]:
    """Variables that a tenant's or a remote server's key is to be in and that hold nothing, by
    where they are named."""
    named: list[tuple[Path, object]] = []
    for kind, many, field in (("tenants", "keys", "env"), ("models", "remote", "api_key_env")):
        for index, _ in items_at(tree, kind):
            for number, item in items_at(tree, kind, index, many):
                named.append(((kind, index, many, number, field), item.get(field)))
    return [
        (path, f"{variable}: is not set, and {dotted(path[:-1])} takes its key from it")
        for path, variable in named
        if isinstance(variable, str) and not environ.get(variable, "").strip()
    ]
