"""/v1/files: what batches read and write, brought and fetched by its tenant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing

from gateway.batches.file_store import FileInUse, StorageFull
from gateway.batches.form import read_upload
from gateway.batches.opening import LateBatches
from gateway.batches.stored_file import StoredFile
from gateway.batches.turns import database_answers
from gateway.errors import ApiError
from gateway.http_call import HttpCall
from gateway.http_disconnect import ends_with_client
from gateway.metrics import Metrics
from gateway.places import FewAtOnce
from gateway.reload import RuntimeConfig
from gateway.request import Request
from gateway.settings_tenants import BatchSettings
from gateway.settlement import settled
from gateway.wire.files import (
    file_card,
    file_deletion,
    file_in_use,
    file_list,
    file_not_found,
    read_listing,
    read_upload_fields,
    storage_full,
)

FILES = "/v1/files"
_PREFIX = FILES + "/"
_CONTENT = "/content"
_ENDPOINT = "files"
_UPLOADS_PER_TENANT = 4
"""At once, at one gateway: parts of a file that is still coming in count in no limit yet."""
_UPLOAD_RETRY_S = 5
_FILES_PER_TENANT = 20

_Handler = Callable[[HttpCall], Awaitable[None]]


class FilesApi:
    """Answers every method of its paths."""

    def __init__(self, runtime: RuntimeConfig, metrics: Metrics, batches: LateBatches) -> None:
        self._runtime = runtime
        self._metrics = metrics
        self._batches = batches
        self._uploads = FewAtOnce(_UPLOADS_PER_TENANT, of="uploads", retry_after_s=_UPLOAD_RETRY_S)

    def methods(self, path: str) -> Mapping[str, _Handler] | None:
        """What can be done at a path; None if it is none of these."""
        if path == FILES:
            return {"GET": self.show_all, "POST": self.upload}
        if not path.startswith(_PREFIX):
            return None
        if path.endswith(_CONTENT):
            return {"GET": self.show_content}
        return {"GET": self.show_one, "DELETE": self.delete}

    async def upload(self, call: HttpCall) -> None:
        """POST /v1/files."""
        request = Request(call, _ENDPOINT, self._runtime.current)
        with settled(request, self._metrics):
            tenant = request.authenticate().id
            settings = request.snapshot.settings.batch
            with database_answers(), self._uploads.place(tenant):
                file = await self._receive(request, tenant, settings)
            await call.answer_json(file_card(file))

    async def _receive(self, request: Request, tenant: str, settings: BatchSettings) -> StoredFile:
        files = self._batches.opened.files
        async with await files.draft() as draft:
            form = await read_upload(request.call, settings.max_bytes, draft.write)
            lives_s = read_upload_fields(form.fields)
            if not draft.size_bytes:
                raise ApiError(400, "The file is empty.", param="file", code="empty_file")
            await draft.end()
            # an upload may take an hour: a tenant that is deleted meanwhile must leave nothing
            self._runtime.current.key_ring.require(request.caller)
            lives_s = settings.file_ttl if lives_s is None else min(lives_s, settings.file_ttl)
            most = most_bytes(settings)
            try:
                return await files.keep(draft, tenant, form.filename, lives_s, most)
            except StorageFull:
                raise storage_full(most) from None

    async def show_all(self, call: HttpCall) -> None:
        """GET /v1/files."""
        request = Request(call, _ENDPOINT, self._runtime.current)
        with settled(request, self._metrics):
            tenant = request.authenticate().id
            wanted = read_listing(call.query())
            with database_answers():
                page = await self._batches.opened.files.page(
                    tenant,
                    purpose=wanted.purpose,
                    after=wanted.after,
                    limit=wanted.limit,
                    ascending=wanted.ascending,
                )
            await call.answer_json(file_list(page))

    async def show_one(self, call: HttpCall) -> None:
        """GET /v1/files/{id}."""
        request = Request(call, _ENDPOINT, self._runtime.current)
        with settled(request, self._metrics):
            tenant = request.authenticate().id
            await call.answer_json(file_card(await self._find(call, tenant)))

    async def show_content(self, call: HttpCall) -> None:
        """GET /v1/files/{id}/content: its bytes, as fast as the client reads them."""
        request = Request(call, _ENDPOINT, self._runtime.current)
        with settled(request, self._metrics):
            file = await self._find(call, request.authenticate().id)
            headers = [
                (b"content-type", b"application/octet-stream"),
                (b"content-length", str(file.size_bytes).encode()),
            ]
            async with ends_with_client(call):
                await call.start(200, headers)
                if call.method != "HEAD":
                    await self._send(call, file)
                await call.send(b"", more=False)

    async def delete(self, call: HttpCall) -> None:
        """DELETE /v1/files/{id}; 409 while a batch was made from it that has not ended."""
        request = Request(call, _ENDPOINT, self._runtime.current)
        with settled(request, self._metrics):
            tenant = request.authenticate().id
            file_id = _id_in_path(call)
            try:
                with database_answers():
                    deleted = await self._batches.opened.files.delete(tenant, file_id)
            except FileInUse:
                raise file_in_use() from None
            if not deleted:
                raise file_not_found()
            await call.answer_json(file_deletion(file_id))

    async def _send(self, call: HttpCall, file: StoredFile) -> None:
        sent = 0
        async with aclosing(self._batches.opened.files.content(file.id)) as parts:
            async for part in parts:
                await call.send(part, more=True)
                sent += len(part)
        if sent != file.size_bytes:  # what is cut short must not look whole
            raise RuntimeError("a file was deleted while it was read")

    async def _find(self, call: HttpCall, tenant: str) -> StoredFile:
        with database_answers():
            file = await self._batches.opened.files.find(tenant, _id_in_path(call))
        if file is None:
            raise file_not_found()
        return file


def most_bytes(settings: BatchSettings) -> int:
    """What a tenant's files and open batches may hold: as much as 20 of the largest inputs."""
    return _FILES_PER_TENANT * settings.max_bytes


def _id_in_path(call: HttpCall) -> str:
    return call.path.removeprefix(_PREFIX).removesuffix(_CONTENT)
