"""The authorities that a server's certificate is checked against."""

from __future__ import annotations

import os
import ssl

_Mark = tuple[tuple[int, int, int] | None, ...]


class Authorities:
    """The system's, or those of the file and directory that `SSL_CERT_FILE` and `SSL_CERT_DIR`
    name. Reading them takes tens of milliseconds: they are read at first, and again only where
    others have come since."""

    def __init__(self) -> None:
        self._mark = _mark()
        self.context = ssl.create_default_context()

    def not_believed(self) -> None:
        """A certificate was refused: look whether that is for authorities of before. Connections
        that are open stay what they are."""
        mark = _mark()
        if mark != self._mark:
            self._mark = mark
            self.context = ssl.create_default_context()


def _mark() -> _Mark:
    """What changes when the files do."""
    paths = ssl.get_default_verify_paths()
    return tuple(_of_file(path) for path in (paths.cafile, paths.capath))


def _of_file(path: str | None) -> tuple[int, int, int] | None:
    if path is None:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
