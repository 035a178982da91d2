"""A path for a unix socket, which the kernel wants short, near a directory that may lie deep."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from gateway.settings_errors import ConfigError

LONGEST_BYTES = 107
"""What the kernel takes, without the zero behind it."""


def socket_path(directory: Path, name: str, environ: Mapping[str, str]) -> Path:
    """`name` in the directory; where that is too long, in a directory of its own, named after this
    one, under XDG_RUNTIME_DIR or else /tmp."""
    mark = hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]
    short = Path(f"forebay-{os.geteuid()}-{mark}") / name
    candidates = [directory / name]
    # The XDG specification says that a relative path there is to be ignored.
    if os.path.isabs(runtime := environ.get("XDG_RUNTIME_DIR", "")) and os.path.isdir(runtime):
        candidates.append(Path(runtime) / short)
    for path in candidates:
        if len(os.fsencode(path)) <= LONGEST_BYTES:
            return path
    return Path("/tmp") / short


def make_private(directory: Path) -> None:
    """Raises ConfigError unless this is, or now becomes, a directory that only we may enter: in a
    place that everybody may write to, somebody else could have been there first."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise ConfigError([f"{directory}: cannot be made ({error.strerror})"]) from None
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.geteuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise ConfigError(
            [f"{directory}: must be a directory of mode 0700 that belongs to this user"]
        )
