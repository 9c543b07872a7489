"""FFmpeg on bytes that somebody else made: formats that hold media themselves, and nothing that leads elsewhere."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av

from mstar.errors import RequestError

# Playlists, concatenations and the like, which name files and hosts, are none of these.
FORMATS = (
    "mov", "mp4", "m4a", "3gp", "matroska", "webm", "avi", "gif", "wav", "w64", "aiff", "au", "caf", "flac", "mp3",
    "ogg", "aac", "asf",
)  # fmt: skip
_MAX_STREAMS = 32


@contextmanager
def open_container(data: bytes, *, what: str, max_pixels: int | None = None, param: str | None = None) -> Iterator[Any]:
    """A container of `FORMATS`, opened by PyAV. What FFmpeg finds wrong inside the block becomes a RequestError.

    Args:
        what: what the client meant to send, for messages.
        max_pixels: of one frame; decoders refuse more.
    """
    options = {"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "none", "max_streams": str(_MAX_STREAMS)}
    if max_pixels is not None:
        options["max_pixels"] = str(max_pixels)
    try:
        with av.open(io.BytesIO(data), options=options, io_open=_refuse, metadata_errors="replace") as container:
            yield container
    except RequestError:
        raise
    except (av.FFmpegError, ValueError, OverflowError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        message = f"the data is no {what} that can be decoded: {reason}"
        raise RequestError(message, param=param, code="invalid_media") from error


def _refuse(url: str, flags: int, options: dict[str, str]) -> Any:
    raise PermissionError("media may not name other files")
