"""/v1/batches: made, watched and cancelled by its tenant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from gateway.batches.batch import Counts
from gateway.batches.batch_store import CannotCancel, NoInputFile, TooManyBatches
from gateway.batches.file_store import StorageFull
from gateway.batches.opening import LateBatches
from gateway.batches.turns import database_answers
from gateway.files_api import most_bytes
from gateway.http_body import read_body
from gateway.http_call import HttpCall
from gateway.metrics import Metrics
from gateway.reload import RuntimeConfig
from gateway.request import Request
from gateway.settlement import settled
from gateway.unknown_fields import UnknownFields
from gateway.wire.batches import (
    WINDOW_S,
    batch_card,
    batch_list,
    batch_not_found,
    cannot_cancel,
    no_input_file,
    read_listing,
    read_new_batch,
    too_many_batches,
)
from gateway.wire.files import storage_full

BATCHES = "/v1/batches"
_PREFIX = BATCHES + "/"
_CANCEL = "/cancel"
_ENDPOINT = "batches"

_Handler = Callable[[HttpCall], Awaitable[None]]


class BatchesApi:
    """Answers every method of its paths."""

    def __init__(self, runtime: RuntimeConfig, metrics: Metrics, batches: LateBatches) -> None:
        self._runtime = runtime
        self._metrics = metrics
        self._batches = batches
        self._unknown_fields = UnknownFields(metrics)

    def methods(self, path: str) -> Mapping[str, _Handler] | None:
        """What can be done at a path; None if it is none of these."""
        if path == BATCHES:
            return {"GET": self.show_all, "POST": self.create}
        if not path.startswith(_PREFIX):
            return None
        if path.endswith(_CANCEL):
            return {"POST": self.cancel}
        return {"GET": self.show_one}

    async def create(self, call: HttpCall) -> None:
        """POST /v1/batches."""
        request = Request(call, _ENDPOINT, self._runtime.current)
        with settled(request, self._metrics):
            request.authenticate()
            settings = request.snapshot.settings
            body = await read_body(call, settings.server.body_limit)
            # it may have taken as long to come as its client liked
            self._runtime.current.key_ring.require(request.caller)
            wanted = read_new_batch(body)
            self._unknown_fields.note(wanted.unknown)
            opened = self._batches.opened
            most = most_bytes(settings.batch)
            assert request.caller is not None
            try:
                with database_answers():
                    batch = await opened.batches.create(
                        request.caller,
                        wanted.input_file,
                        wanted.endpoint,
                        wanted.metadata,
                        window_s=WINDOW_S,
                        most_bytes=most,
                    )
            except NoInputFile:
                raise no_input_file() from None
            except TooManyBatches:
                raise too_many_batches() from None
            except StorageFull:
                raise storage_full(most) from None
            opened.runner.wake()
            await call.answer_json(batch_card(batch, Counts(0, 0, 0)))

    async def show_all(self, call: HttpCall) -> None:
        """GET /v1/batches."""
        request = Request(call, _ENDPOINT, self._runtime.current)
        with settled(request, self._metrics):
            tenant = request.authenticate().id
            wanted = read_listing(call.query())
            with database_answers():
                page = await self._batches.opened.batches.page(
                    tenant, after=wanted.after, limit=wanted.limit
                )
            await call.answer_json(batch_list(page))

    async def show_one(self, call: HttpCall) -> None:
        """GET /v1/batches/{id}."""
        request = Request(call, _ENDPOINT, self._runtime.current)
        with settled(request, self._metrics):
            tenant = request.authenticate().id
            with database_answers():
                found = await self._batches.opened.batches.find(tenant, _id_in_path(call))
            if found is None:
                raise batch_not_found()
            await call.answer_json(batch_card(*found))

    async def cancel(self, call: HttpCall) -> None:
        """POST /v1/batches/{id}/cancel: what has been answered is kept, and nothing more begun."""
        request = Request(call, _ENDPOINT, self._runtime.current)
        with settled(request, self._metrics):
            tenant = request.authenticate().id
            opened = self._batches.opened
            try:
                with database_answers():
                    found = await opened.batches.cancel(tenant, _id_in_path(call))
            except CannotCancel as ended:
                raise cannot_cancel(ended.status) from None
            if found is None:
                raise batch_not_found()
            opened.runner.wake()
            await call.answer_json(batch_card(*found))


def _id_in_path(call: HttpCall) -> str:
    return call.path.removeprefix(_PREFIX).removesuffix(_CANCEL)
