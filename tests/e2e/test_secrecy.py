"""No key shows up anywhere, and no client can grow the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx

from tests.e2e.client import AC_KEY, ACME_KEY, CHAT, Client, chat
from tests.e2e.gateway_process import GatewayProcess

NAMES = 1000
WRONG_KEYS = (
    "sk-wrong-7Jd0Qm3zXc5Vb",
    "sk-forebay-expired-8Yt2Lk6Pw4Rn",
    "hunter2-9Gh1Fs",
)


def test_no_key_is_in_any_output(gateway: GatewayProcess, acme: Client) -> None:
    """The gateway logs at debug level; keys come where they belong and where they do not."""
    shown = []
    for key in (*WRONG_KEYS, acme.key):
        for headers in (
            {"Authorization": f"Bearer {key}"},
            {"Authorization": key},
            {"Authorization": f"Basic {key}"},
            {"X-Api-Key": key, "Cookie": f"key={key}"},
        ):
            for path in (CHAT, f"{CHAT}?api_key={key}", f"/v1/models/{key}", f"/{key}"):
                body = chat("ping", "tiny", max_tokens=1, user=key, unknown=key)
                answers = (
                    acme.http.post(path, json=body, headers=headers),
                    acme.http.post(path, content=key.encode(), headers=headers),
                    acme.http.get(path, headers=headers),
                )
                shown += [answer.text + str(answer.headers) for answer in answers]
        acme.post(CHAT, chat("ping", key))
        acme.post(CHAT, chat("ping", "tiny", **{key: 1, "temperature": key}))
    shown.append(gateway.metrics().text)
    shown.append(gateway.output)
    last = acme.post(CHAT, chat("ping", "nope")).headers["x-request-id"]
    assert last in gateway.output  # what is searched is what the requests left behind
    for key in (*WRONG_KEYS, ACME_KEY, AC_KEY):
        assert not any(key in text for text in shown)


def test_a_tenants_key_does_not_open_metrics_to_others(
    gateway: GatewayProcess, acme: Client
) -> None:
    forwarded = acme.headers | {"X-Forwarded-For": "203.0.113.7"}
    assert acme.http.get("/metrics", headers=forwarded).status_code == 403


async def for_each(ask: Callable[[str], Awaitable[None]], names: list[str]) -> None:
    """Twenty at a time."""
    for first in range(0, len(names), 20):
        await asyncio.gather(*(ask(name) for name in names[first : first + 20]))


async def test_a_thousand_names_add_no_series(gateway: GatewayProcess) -> None:
    headers = {"Authorization": f"Bearer {ACME_KEY}"}
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60) as http:

        async def ask(name: str) -> None:
            missing = await http.post(CHAT, json=chat("ping", name, user=name))
            assert missing.status_code == 404
            assert (await http.get(f"/{name}/x")).status_code == 404

        async def answered(name: str) -> None:
            body = chat("ping", "tiny", max_tokens=1, user=name, prompt_cache_key=name)
            assert (await http.post(CHAT, json=body | {name: 1})).status_code == 200

        await ask("model-first")
        await answered("user-first")
        assert (await http.request("BREW", CHAT)).status_code in (400, 405)
        before = gateway.metrics().series()
        memory = gateway.rss_bytes()
        await for_each(ask, [f"model-{number}" for number in range(NAMES)])
        await for_each(answered, [f"user-{number}" for number in range(100)])
        metrics = gateway.metrics()
    assert metrics.series() == before
    assert not any(part in metrics.text for part in ("model-1", "user-1"))
    assert metrics.total("forebay_requests_total", model="other", outcome="refused") >= NAMES
    assert gateway.rss_bytes() - memory < 8 << 20
