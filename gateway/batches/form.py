"""Reading an upload's multipart/form-data (RFC 7578) as it comes in, without keeping its file in
memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from gateway.errors import ApiError, bad_request
from gateway.http_body import too_large
from gateway.http_call import ClientDisconnectedError, HttpCall

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_FILE = "file"
_IDLE_S = 60.0
_LONGEST_S = 3600.0
_AROUND_FILE_BYTES = 256 << 10
"""What of the body may be something else than the file."""
_MOST_FIELDS = 32
_LONGEST_FIELD_BYTES = 4 << 10
_LONGEST_HEAD_BYTES = 8 << 10
_LONGEST_FILENAME = 255


@dataclass(frozen=True, slots=True)
class UploadForm:
    """The form's fields but for the file, and the name that the file has at its client's."""

    fields: dict[str, str]
    filename: str


async def read_upload(
    call: HttpCall, most_bytes: int, write: Callable[[bytes], Awaitable[None]]
) -> UploadForm:
    """Hand the content of the field `file` to `write`, piece by piece; it may come before other
    fields or behind them.

    Raises ApiError 400 for a body that is no such form, 413 for a file of more than `most_bytes`,
    415 for an encoded body, 408 when the client stalls, and ClientDisconnectedError when it leaves.
    """
    if (call.header("content-encoding") or "identity").strip().lower() != "identity":
        raise ApiError(
            415, "An upload must not have a Content-Encoding.", code="unsupported_encoding"
        )
    length = call.header("content-length")
    longest = most_bytes + _AROUND_FILE_BYTES
    if length is not None and length.isdigit() and int(length) > longest:
        raise too_large(most_bytes)
    form = _Form(_boundary(call), most_bytes)
    received = 0
    late_s = monotonic() + _LONGEST_S
    more = True
    while more:
        try:
            async with asyncio.timeout(_IDLE_S):
                message = await call.receive()
        except TimeoutError:
            raise _too_slow() from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        more = message.get("more_body", False)
        piece = message.get("body", b"")
        received += len(piece)
        if received > longest:
            raise too_large(most_bytes)
        if content := form.feed(piece):
            await write(content)
        if monotonic() > late_s:
            raise _too_slow()
    return form.read()


def _boundary(call: HttpCall) -> bytes:
    kind, options = parse_options_header(call.header("content-type"))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise bad_request("A file is uploaded as multipart/form-data.")
    return boundary


@dataclass(slots=True)
class _Part:
    """One of the form's parts while it is read. `name` None: its headers are not complete."""

    name: str | None = None
    filename: str | None = None
    header: bytearray = field(default_factory=bytearray)
    header_value: bytearray = field(default_factory=bytearray)
    head_bytes: int = 0
    value: bytearray = field(default_factory=bytearray)


class _Form:
    """Collects what the parser finds."""

    def __init__(self, boundary: bytes, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._fields: dict[str, str] = {}
        self._parts = 0
        self._part = _Part()
        self._content = bytearray()
        self._file_bytes = 0
        self._filename: str | None = None
        self._ended = False
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._add_to_header,
            "on_header_value": self._add_to_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_head,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }
        try:
            self._parser = MultipartParser(boundary, callbacks)
        except FormParserError:
            raise _broken() from None

    def feed(self, piece: bytes) -> bytes:
        """The file's bytes in a piece of the body."""
        if piece:
            try:
                self._parser.write(piece)
            except FormParserError:
                raise _broken() from None
        content = bytes(self._content)
        self._content.clear()
        return content

    def read(self) -> UploadForm:
        """The form, once all of it is there."""
        if not self._ended:
            raise _broken()
        if self._filename is None:
            raise bad_request("file is required.", param=_FILE)
        return UploadForm(self._fields, self._filename)

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MOST_FIELDS:
            raise bad_request(f"The form has more than {_MOST_FIELDS} fields.")
        self._part = _Part()

    def _add_to_header(self, data: bytes, start: int, end: int) -> None:
        self._count_head(end - start)
        self._part.header += data[start:end]

    def _add_to_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_head(end - start)
        self._part.header_value += data[start:end]

    def _count_head(self, size: int) -> None:
        self._part.head_bytes += size
        if self._part.head_bytes > _LONGEST_HEAD_BYTES:
            raise bad_request("A field of the form has too long a head.")

    def _end_header(self) -> None:
        part = self._part
        if bytes(part.header).lower() == b"content-disposition":
            _, options = parse_options_header(bytes(part.header_value))
            part.name = options.get(b"name", b"").decode("utf-8", "replace")
            if (filename := options.get(b"filename")) is not None:
                part.filename = _filename(filename)
        part.header.clear()
        part.header_value.clear()

    def _end_head(self) -> None:
        part = self._part
        if not part.name:
            raise bad_request("A field of the form has no name.")
        if part.name == _FILE:
            if self._filename is not None:
                raise bad_request("file must be given once.", param=_FILE)
            self._filename = part.filename or "upload"

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        part = self._part
        if part.name == _FILE:
            self._file_bytes += end - start
            if self._file_bytes > self._most_bytes:
                raise too_large(self._most_bytes)
            self._content += memoryview(data)[start:end]
            return
        part.value += data[start:end]
        if len(part.value) > _LONGEST_FIELD_BYTES:
            raise bad_request("A field of the form is too long.")

    def _end_part(self) -> None:
        part = self._part
        if part.name and part.name != _FILE:
            self._fields[part.name] = part.value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._ended = True


def _filename(raw: bytes) -> str:
    """The last part of the path, without what cannot be shown."""
    name = raw.decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
    return "".join(each for each in name if each.isprintable())[:_LONGEST_FILENAME]


def _too_slow() -> ApiError:
    return ApiError(408, "The body did not arrive in time.", code="timeout")


def _broken() -> ApiError:
    return bad_request("The body is no multipart/form-data that is whole.")
