"""Everything behind the application, opened in order and closed in reverse."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

from sqlalchemy.exc import SQLAlchemyError

from gateway.batches.opening import open_batches
from gateway.database.opening import open_database
from gateway.ended_tasks import begin_task, end_task
from gateway.fleet import Fleet, open_fleet
from gateway.ledger.opening import open_ledger
from gateway.ledger.storage import Kept, StorageMeter
from gateway.lifecycle import Lifecycle
from gateway.limits.opening import open_limiter
from gateway.listening import WORKERS
from gateway.load_progress import ReportProgress
from gateway.metrics import Metrics
from gateway.models import Models
from gateway.named_caches import NamedCaches
from gateway.redis_services import open_redis
from gateway.reload import RuntimeConfig
from gateway.settings import Settings
from gateway.settings_errors import ConfigError
from gateway.state_dir import StateDir
from gateway.tenancy import Tenancy

_LAST_SETTLEMENTS_S = 5.0


@asynccontextmanager
async def open_gateway(
    settings: Settings,
    *,
    models: Models,
    environ: Mapping[str, str],
    secret: bytes,
    metrics: Metrics,
    progress: ReportProgress,
    runtime: RuntimeConfig,
    tenancy: Tenancy,
    lifecycle: Lifecycle,
) -> AsyncIterator[Fleet]:
    """The database, Redis, the tenants' books, every model with its replicas, and batches; yields
    the fleet. `models` and `tenancy` are filled.

    Raises as `open_fleet` does, and ConfigError for a database that cannot be used.
    """
    async with AsyncExitStack() as held:
        database = await held.enter_async_context(open_database(settings.database, environ))
        tenancy.database.use(database)
        redis = await held.enter_async_context(open_redis(settings.redis, environ, secret, metrics))
        book = await held.enter_async_context(
            open_ledger(
                database,
                StateDir.open(environ),
                lambda: runtime.current.settings.ledger.retention,
                metrics.ledger,
            )
        )
        fleet: Fleet | None = None
        workers = int(environ.get(WORKERS, "1"))

        def gateways() -> int:
            return workers if fleet is None else max(workers, fleet.gateways)

        limiter = await held.enter_async_context(
            open_limiter(
                redis.url,
                spent=book.spent,
                gateways=gateways,
                timeout_s=settings.redis.timeout_ms / 1e3,
                tls_ca=settings.redis.tls_ca,
                cluster=redis.cluster,
            )
        )
        tenancy.open(limiter, book)
        metrics.limits.watch(lambda: limiter.counts)
        metrics.registry.watch(lambda: tenancy.registry.stats(tenancy.trail))
        try:
            await held.enter_async_context(tenancy.registry.following())
        except SQLAlchemyError as error:
            raise ConfigError(
                [f"database: tenants and keys cannot be read ({type(error).__name__})"]
            ) from None
        # what the end of the fleet cuts off is settled before its books are closed
        held.push_async_callback(lifecycle.wait_idle, _LAST_SETTLEMENTS_S)
        fleet = await held.enter_async_context(
            open_fleet(
                settings,
                models=models,
                environ=environ,
                secret=secret,
                metrics=metrics,
                progress=progress,
                redis=redis,
            )
        )
        named = NamedCaches(redis.named, secret)
        meter = StorageMeter(
            lambda: _kept(runtime, named),
            book,
            lambda model: tenancy.model_terms.price(runtime.current.settings, model),
        )
        if redis.url is None:
            held.callback(meter.end_all)  # named prefixes end with this process
        held.push_async_callback(end_task, begin_task(meter.run(), "storage"))
        if tenancy.lines is not None:
            batches = await held.enter_async_context(
                open_batches(database, models, runtime, tenancy.lines)
            )
            tenancy.batches.use(batches)
            metrics.batches.watch(lambda: batches.runner.counts)
        yield fleet


async def _kept(runtime: RuntimeConfig, named: NamedCaches) -> list[Kept] | None:
    """Named prefixes, where keeping them costs anything."""
    settings = runtime.current.settings
    if not any(model.price.storage for model in settings.models):
        return []
    found = await named.kept_by(tenant.id for tenant in settings.tenants)
    if found is None:
        return None
    return [Kept(tenant, cache) for tenant, caches in found.items() for cache in caches]
