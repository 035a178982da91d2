"""The gateway as one ASGI application: routes, and what every answer has in common."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import structlog
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import endpoints
from gateway.admin import routes as admin_routes
from gateway.admin.ledger import LedgerAdmin
from gateway.admin.usage import UsageAdmin
from gateway.batches_api import BatchesApi
from gateway.caches_api import CACHE_PREFIX, CACHES, CachesApi
from gateway.errors import ApiError, internal_error, unavailable
from gateway.files_api import FilesApi
from gateway.fleet_control import FleetControl, LateFleetControl
from gateway.http_call import REQUEST_ID, ClientDisconnectedError, HttpCall
from gateway.journey import Journey
from gateway.lifecycle import Lifecycle
from gateway.logs import bind_request_id
from gateway.metrics import Metrics
from gateway.model_list import MODEL_PREFIX, ModelList
from gateway.models import Models
from gateway.named_cache_store import MemoryStore, NamedCacheStore
from gateway.named_caches import NamedCaches
from gateway.offline import OfflineCalls
from gateway.random_names import RandomNames
from gateway.recent_requests import RecentRequests
from gateway.reload import RuntimeConfig
from gateway.sse import StreamTimes
from gateway.status_pages import StatusPages
from gateway.tenancy import Tenancy
from gateway.tokenizing import Tokenizing
from gateway.usage_api import USAGE, UsageApi

_log = structlog.get_logger("forebay.http")

Handler = Callable[[HttpCall], Awaitable[None]]

_request_ids = RandomNames(12)
_SANE_ID = re.compile(rb"[A-Za-z0-9_.-]{1,128}")
_LOADING_RETRY_S = 5
_DRAINING_RETRY_S = 5
_EXPOSED_HEADERS = (
    "x-request-id",
    "retry-after",
    "x-forebay-replica",
    "x-forebay-predicted-ttft-ms",
    "x-forebay-cached-tokens",
    "x-forebay-cached-tiers",
    "x-forebay-queue-ms",
    "x-forebay-engine-ms",
    "x-forebay-limits",
    "x-forebay-cost-usd",
    *(
        f"x-ratelimit-{kind}-{unit}"
        for kind in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
)


def create_app(
    runtime: RuntimeConfig,
    models: Models,
    metrics: Metrics,
    secret: bytes,
    lifecycle: Lifecycle,
    *,
    stream_times: StreamTimes = StreamTimes(),  # noqa: B008 - frozen
    named_store: NamedCacheStore | None = None,
    control: FleetControl | None = None,
    tenancy: Tenancy | None = None,
) -> ASGIApp:
    """The application. `models` may be filled later, but before `lifecycle` says that it is ready;
    `secret` keys every prefix chain. `named_store` keeps the named prefixes; None: this process's
    memory alone. `control` adds and removes replicas; None: nobody does. `tenancy` keeps account of
    tenants, and gets who runs the lines of their batches; None: in this process's memory."""
    tenancy = tenancy or Tenancy(runtime, metrics)
    recent = RecentRequests()
    named = NamedCaches(named_store or MemoryStore(), secret)
    journey = Journey(runtime, models, metrics, secret, stream_times, named, tenancy, recent)
    model_list = ModelList(runtime, models, metrics)
    tokenizing = Tokenizing(runtime, models, metrics)
    caches = CachesApi(runtime, models, metrics, named, journey, tenancy, recent)
    pages = StatusPages(runtime, models, metrics, lifecycle)
    tenancy.lines = OfflineCalls(journey, lifecycle)
    files = FilesApi(runtime, metrics, tenancy.batches)
    batches = BatchesApi(runtime, metrics, tenancy.batches)
    usage = UsageApi(runtime, metrics, lambda: tenancy.book)
    api: dict[str, dict[str, Handler]] = {
        "/v1/models": {"GET": model_list.show_all},
        "/v1/chat/completions": {"POST": partial(journey.run, endpoint=endpoints.CHAT)},
        "/v1/completions": {"POST": partial(journey.run, endpoint=endpoints.COMPLETIONS)},
        CACHES: {"GET": caches.show_all, "POST": caches.create},
        USAGE: {"GET": usage.show},
        "/tokenize": {"POST": tokenizing.tokenize},
        "/v1/tokenize": {"POST": tokenizing.tokenize},
        "/detokenize": {"POST": tokenizing.detokenize},
        "/v1/detokenize": {"POST": tokenizing.detokenize},
    }
    open_at_all_times: dict[str, dict[str, Handler]] = {
        "/health": {"GET": pages.ready},  # what routers ask an upstream, as vLLM's answers
        "/health/live": {"GET": pages.live},
        "/health/ready": {"GET": pages.ready},
        "/metrics": {"GET": pages.metrics},
        "/version": {"GET": pages.version},
    }
    admin = admin_routes.make_admin(
        runtime,
        models,
        secret,
        recent,
        named,
        journey,
        control or LateFleetControl(),
        tenancy.database,
        tenancy.registry,
        tenancy.trail,
        metrics.utilization,
        {
            "/admin/usage": {"GET": UsageAdmin(runtime, lambda: tenancy.book).show},
            "/admin/ledger": {"GET": LedgerAdmin(runtime, lambda: tenancy.book).export},
        },
    )

    def by_path(path: str) -> Mapping[str, Handler] | None:
        if path.startswith(MODEL_PREFIX):
            return {"GET": model_list.show_one}
        if path.startswith(CACHE_PREFIX):
            return {"GET": caches.show_one, "POST": caches.extend, "DELETE": caches.delete}
        if path.startswith(admin_routes.PREFIX):
            return admin.methods(path)
        return files.methods(path) or batches.methods(path)

    routes = Routes(api, open_at_all_times, by_path, lifecycle)
    return Application(routes, runtime)


class Routes:
    """From path and method to a handler; what is none is a 404 or a 405 in OpenAI's envelope."""

    def __init__(
        self,
        api: Mapping[str, Mapping[str, Handler]],
        open_at_all_times: Mapping[str, Mapping[str, Handler]],
        by_path: Callable[[str], Mapping[str, Handler] | None],
        lifecycle: Lifecycle,
    ) -> None:
        """`open_at_all_times` is answered always, `api` and what `by_path` finds for paths that
        hold a name only while the gateway is ready."""
        self._api = api
        self._open = open_at_all_times
        self._by_path = by_path
        self._lifecycle = lifecycle

    async def handle(self, call: HttpCall) -> None:
        """Answer the call or raise ApiError."""
        methods = self._open.get(call.path)
        if methods is not None:
            await _handler(methods, call)(call)
            return
        methods = self._api.get(call.path) or self._by_path(call.path)
        if methods is None:
            raise self._nothing_at(call.path)
        handler = _handler(methods, call)
        self._require_ready()
        with self._lifecycle.request():
            await handler(call)

    def _nothing_at(self, path: str) -> ApiError:
        """A base URL without "/v1" is the usual reason."""
        under_v1 = f"/v1{path}"
        hint = ""
        if under_v1 in self._api or self._by_path(under_v1) is not None:
            hint = " The same path under /v1 is one: the base URL should end in /v1."
        return ApiError(404, f"There is nothing at this path.{hint}", code="not_found")

    def _require_ready(self) -> None:
        if self._lifecycle.draining:
            error = unavailable(
                "The server is shutting down.", code="draining", retry_after_s=_DRAINING_RETRY_S
            )
            error.headers["connection"] = "close"
            raise error
        if not self._lifecycle.ready:
            raise unavailable(
                "The models are still loading.", code="loading", retry_after_s=_LOADING_RETRY_S
            )


class Application:
    """The outermost shell: request ids, CORS, and errors in one envelope."""

    def __init__(self, routes: Routes, runtime: RuntimeConfig) -> None:
        self._routes = routes
        self._runtime = runtime
        self._cors: tuple[tuple[str, ...], ASGIApp | None] = ((), None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's entry."""
        if scope["type"] == "http":
            scope["state"] = {**scope.get("state", {}), "request_id": _request_id(scope)}
            cors = self._with_cors()
            if cors is None:
                await self._answer(scope, receive, send)
            else:
                await cors(scope, receive, _with_request_id(scope, send))
        elif scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1003})

    def _with_cors(self) -> ASGIApp | None:
        """The layer for the configured origins, which change with a reload; None if there are
        none."""
        origins = self._runtime.current.settings.server.cors_origins
        if self._cors[0] != origins:
            layer = CORSMiddleware(
                self._answer,
                allow_origins=origins,
                allow_methods=("GET", "POST", "PATCH", "DELETE"),
                allow_headers=("*",),
                expose_headers=_EXPOSED_HEADERS,
            )
            self._cors = (origins, layer if origins else None)
        return self._cors[1]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = HttpCall(scope, receive, send)
        bind_request_id(call.request_id)
        try:
            await self._routes.handle(call)
        except ApiError as error:
            if not call.response_started:
                await call.answer_error(error)
        except ClientDisconnectedError:
            return
        except Exception:
            _log.exception("request failed")
            if call.response_started:
                raise  # the server cuts the connection: a broken answer must not look whole
            await call.answer_error(internal_error(call.request_id))


def _request_id(scope: Scope) -> str:
    """The client's request id if it is sane, else a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID:
            if _SANE_ID.fullmatch(value):
                return str(value, "ascii")
            break
    return "req-" + _request_ids.next()


def _with_request_id(scope: Scope, send: Send) -> Send:
    """Put the request's id on what a layer answers by itself; our own answers have it."""
    header = (REQUEST_ID, scope["state"]["request_id"].encode())

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start" and header not in message["headers"]:
            message["headers"] = [*message["headers"], header]
        await send(message)

    return send_with_id


def _handler(methods: Mapping[str, Handler], call: HttpCall) -> Handler:
    handler = methods.get("GET" if call.method == "HEAD" else call.method)
    if handler is None:
        allowed = ", ".join(methods)
        raise ApiError(
            405,
            f"This path takes only {allowed}.",
            code="method_not_allowed",
            headers={"allow": allowed},
        )
    return handler


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing to do at start and end: the server opens and closes what the application uses."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
