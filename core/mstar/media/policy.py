"""What an operator allows of media in requests, and what one request has left of it.

Knows names and addresses of hosts, not how to reach them.
"""

from __future__ import annotations

import functools
import ipaddress
import threading
import time
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from mstar.config import EngineConfig
from mstar.errors import RequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_DECODERS = 2
"""Media that are decoded at once, in all requests together: the rest of the server keeps its cores."""
_DECODERS = threading.BoundedSemaphore(MAX_DECODERS)
_UNICAST = ipaddress.IPv6Network("2000::/3")  # leaves out mapped IPv4, NAT64, unique local, link-local and multicast


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPolicy:
    """What media may be read, and how large they may be. Arguments are those of the flags.

    Args:
        allowed_domains: hosts that URLs may name: `example.org`, `*.example.org` (not itself), `*` for all. Nobody is
            asked at an address that is not public but where that address, or a network with it, stands here too.
        allowed_local_path: files below it may be named by clients; None: no file may.
        max_bytes: of one file that is fetched or read.
        max_audio_s, max_video_s: of one sound, of one video.
        most_of_kind: "image", "audio" or "video" -> most of them in a request; others have no limit.
        memory_bytes: of all decoded media of one request together.
        timeout_s: for all media of one request together, from first to last.
        max_redirects: of one URL.
    """

    allowed_domains: tuple[str, ...] = ()
    allowed_local_path: Path | None = None
    max_bytes: int = 64 * 1024**2
    max_image_pixels: int = 32 * 1024**2
    max_video_frames: int = 1024
    max_audio_s: float = 3600.0
    max_video_s: float = 3600.0
    most_of_kind: Mapping[str, int] = field(default_factory=dict)
    memory_bytes: int = 1024**3
    timeout_s: float = 30.0
    max_redirects: int = 5

    @classmethod
    def of(cls, config: EngineConfig, *, is_offline: bool = False) -> Self:
        """As configured. Offline the user names the URLs, so that without a list every public host is asked."""
        folder = config.allowed_local_media_path
        return cls(
            allowed_domains=config.allowed_media_domains or (("*",) if is_offline else ()),
            allowed_local_path=None if folder is None else Path(folder).resolve(),
            max_bytes=config.max_media_bytes,
            max_image_pixels=config.max_image_pixels,
            max_video_frames=config.max_video_frames,
            max_audio_s=config.max_audio_duration_s,
            max_video_s=config.max_video_duration_s,
            most_of_kind=config.limit_mm_per_prompt,
            memory_bytes=config.media_memory_bytes,
            timeout_s=config.media_timeout_s,
        )

    def allows_host(self, host: str) -> bool:
        """Whether a URL may name this host: a name in lower case, or an address."""
        names = self.allowed_domains
        parents = {"*." + host[i + 1 :] for i, letter in enumerate(host) if letter == "."}
        if (address := _address(host)) is not None:
            return "*" in names or self._names_address(address)
        return "*" in names or host in names or not parents.isdisjoint(names)

    def allows_address(self, address: str) -> bool:
        """Whether a connection to this address may be made: it is public, or the operator has named it."""
        found = _address(address)
        return found is not None and (_is_public(found) or self._names_address(found))

    def _names_address(self, address: Address) -> bool:
        return any(address in network for network in map(_network, self.allowed_domains))


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


@functools.cache
def _network(text: str) -> Container[Any]:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return ()


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        return address in _UNICAST and address.is_global and address.sixtofour is None and address.teredo is None
    return address.is_global and not address.is_multicast and not address.is_reserved


class Budget:
    """What one request may still take. Used in one thread.

    Args:
        deadline: of the request, in seconds of `time.monotonic`; None: there is none.
    """

    def __init__(self, policy: MediaPolicy, *, deadline: float | None = None) -> None:
        self.policy = policy
        self._timeout_s = policy.timeout_s
        self._end = time.monotonic() + policy.timeout_s
        self._end = self._end if deadline is None else min(self._end, deadline)
        self._num_bytes = 0

    def left_s(self, param: str | None) -> float:
        """Seconds left. Raises RequestError if there are none."""
        if (left_s := self._end - time.monotonic()) > 0:
            return left_s
        message = f"{param} could not be read in time: all media of a request together may take {self._timeout_s:g} s, "
        message += "and no longer than the request; send or ask for less, or raise --media-timeout"
        raise RequestError(message, param=param, code="media_timeout")

    def take(self, num_bytes: int, what: str, param: str | None) -> None:
        """Count memory of decoded media before it is made. Raises RequestError if it is too much.

        Args:
            what: what the memory is for, for the message: such as "16 frames of 640x480".
        """
        self._num_bytes += num_bytes
        if self._num_bytes > (limit := self.policy.memory_bytes):
            message = f"{param} needs {num_bytes} bytes decoded ({what}), and with the media before it "
            message += f"{self._num_bytes}; the limit is {limit}; send or ask for less, or raise --media-memory-bytes"
            raise RequestError(message, param=param, code="media_too_large")

    @contextmanager
    def decoding(self, param: str | None) -> Iterator[None]:
        """Where decoding happens: few requests do it at once. Raises RequestError if the turn does not come in time."""
        if not _DECODERS.acquire(timeout=self.left_s(param)):
            message = f"{param} was not decoded in time, as {MAX_DECODERS} media are decoded at once; try again later"
            raise RequestError(message, param=param, status=503, code="media_busy")
        try:
            yield
        finally:
            _DECODERS.release()
