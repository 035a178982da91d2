"""What is compared, as it is named on a command line, and how each becomes a server to measure.

    NAME=http://127.0.0.1:9001/v1   a server that runs already
    NAME=settings.yaml              forebay, started here with that file
    NAME=forebay                    the same with the bundled model and no file
    NAME=peer:llama.cpp             a peer that `python -m loadtest.peers install` has installed

`NAME=` may be left out. A key is sent to every URL, and to nothing else; a model is asked for at
every URL, and of forebay with a file, which may have several. Those that are started all stay up
until the end, so that they can be measured in turn; only one at a time is given anything to do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import orjson
import yaml

from loadtest.bench.campaign import CampaignError
from loadtest.forebay_server import KEY_VARIABLE, running_forebay
from loadtest.hidden_keys import HIDDEN_KEY
from loadtest.peers.running import running_peer
from loadtest.target import Target
from loadtest.wire.connection import (
    Answer,
    Endpoint,
    ExchangeError,
    UnreachableError,
    checked_key,
    fetch,
)

Kind = Literal["url", "config", "forebay", "peer"]
Tell = Callable[[str], None]

_OWN = "forebay"
_PEER = "peer:"
_OWN_TENANT = "loadtest"
_SHOWN_CHARACTERS = 200
_NO_ENTRY = (401, 403)
_WITH_MODELS = ("url", "config")


class Source(NamedTuple):
    """Where a contender comes from: a URL, a file, nothing more for `forebay`, a peer's name."""

    name: str
    kind: Kind
    value: str

    @classmethod
    def parse(cls, text: str) -> Source:
        """From "NAME=WHAT" or "WHAT". Raises ValueError with one line that says what is wrong."""
        name, equals, value = text.partition("=")
        # A URL or a path may have an equals sign of its own.
        if not equals or "/" in name or ":" in name:
            name, value = "", text
        if equals and not value:
            raise ValueError(f"{text}: nothing after the equals sign")
        if value.startswith(("http://", "https://")):
            at = Endpoint.parse(value)
            return cls(name or at.authority, "url", value)
        if value == _OWN:
            return cls(name or value, "forebay", "")
        if value.startswith(_PEER) and value != _PEER:
            peer = value.removeprefix(_PEER)
            return cls(name or peer, "peer", peer)
        if value.endswith((".yaml", ".yml")):
            return cls(name or Path(value).stem, "config", value)
        raise ValueError(f"{text}: is no URL, no .yaml file, and neither forebay nor peer:NAME")


@asynccontextmanager
async def opened(
    sources: Sequence[Source],
    *,
    key: str | None = None,
    model: str | None = None,
    tell: Tell,
) -> AsyncIterator[tuple[Target, ...]]:
    """A target for each source, in order, until the end of the scope, when what was started here is
    stopped. `key` is for URLs, `model` for URLs and files; without a model, the first one that a
    server lists.

    Raises CampaignError if one of them does not come up or cannot be asked, and ValueError as
    `checked` does.
    """
    checked(sources, key=key, model=model)
    async with AsyncExitStack() as scope:
        targets = []
        for source in sources:
            if source.kind != "url":
                tell(f"{source.name}: starting")
            targets.append(await _opened(source, key, model, scope, tell))
        yield tuple(targets)


def checked(sources: Sequence[Source], *, key: str | None, model: str | None) -> None:
    """Raises ValueError if two have one name, if none of them can be asked for the model, or if the
    key is none that can be sent."""
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name}: two servers have this name; give them others, as in a=URL")
    if model is not None and all(source.kind not in _WITH_MODELS for source in sources):
        raise ValueError("--model: is for URLs and files; what is started here has one model")
    checked_key(key)


async def first_model(endpoint: Endpoint) -> str:
    """The first model that a server lists. Raises CampaignError."""
    where = f"{endpoint.url}/models"
    try:
        answer = await fetch(endpoint, "GET", f"{endpoint.base_path}/models")
    except UnreachableError as error:
        raise CampaignError(str(error)) from None
    except ExchangeError as error:
        raise CampaignError(f"{where}: {error}") from None
    if answer.status in _NO_ENTRY:
        which = (
            "is the key right?" if endpoint.key else "it wants a key, and FOREBAY_API_KEY has none"
        )
        raise CampaignError(f"{where}: answered {answer.status}: {which}")
    if answer.status != 200:
        hint = "; give --model if it lists none"
        raise CampaignError(f"{where}: answered {answer.status}{_location(answer)}{hint}")
    try:
        found = orjson.loads(answer.body)["data"][0]["id"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        found = None
    if not isinstance(found, str):
        shown = answer.body.decode(errors="replace")
        if endpoint.key:
            shown = shown.replace(endpoint.key, HIDDEN_KEY)
        raise CampaignError(f"{where}: lists no model, {shown[:_SHOWN_CHARACTERS]!r}")
    return found


def _location(answer: Answer) -> str:
    elsewhere = answer.headers.get("location")
    return "" if elsewhere is None else f" (location: {elsewhere})"


async def _opened(
    source: Source, key: str | None, model: str | None, scope: AsyncExitStack, tell: Tell
) -> Target:
    if source.kind == "peer":
        peer = await scope.enter_async_context(running_peer(source.value, tell=tell))
        endpoint, model = peer.target.endpoint, peer.target.model
    elif source.kind == "url":
        endpoint = Endpoint.parse(source.value, key)
    elif source.kind == "forebay":
        endpoint, model = (await scope.enter_async_context(running_forebay())).endpoint, None
    else:
        start = _with_file(Path(source.value))
        server = running_forebay(start.settings, flags=start.flags)
        endpoint = (await scope.enter_async_context(server)).endpoint
    return Target(source.name, endpoint, model or await first_model(endpoint))


class _Start(NamedTuple):
    settings: dict[str, str]
    flags: tuple[str, ...]


def _with_file(path: Path) -> _Start:
    """How forebay is started with a file of somebody's: as it is and where it is, for the paths in
    it are relative to it, and with a tenant more, whose key is the one that is measured with.
    Raises CampaignError."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise CampaignError(f"{path}: cannot be read ({why})") from None
    except (yaml.YAMLError, ValueError):
        # Its own words quote the file, which may hold secrets.
        raise CampaignError(f"{path}: is no valid YAML; `forebay check` says where") from None
    # Whatever else is wrong with the file, forebay says when it starts.
    tenants = tree.get("tenants") if isinstance(tree, dict) else None
    tenants = tenants if isinstance(tenants, list) else []
    flags = ("--config", str(path.absolute()))  # the last one given counts
    known = [tenant for tenant in tenants if isinstance(tenant, dict)]
    if any(_has_our_key(tenant) for tenant in known):
        return _Start({}, flags)
    name = _OWN_TENANT
    while any(tenant.get("id") == name for tenant in known):
        name += "-client"
    added = f"FOREBAY_TENANTS__{len(tenants)}"
    return _Start({f"{added}__ID": name, f"{added}__KEYS": f"[{{env: {KEY_VARIABLE}}}]"}, flags)


def _has_our_key(tenant: dict[str, Any]) -> bool:
    keys = tenant.get("keys")
    return isinstance(keys, list) and any(
        isinstance(key, dict) and key.get("env") == KEY_VARIABLE for key in keys
    )
