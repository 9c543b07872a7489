"""The bytes behind a reference to media: a data URI, an http(s) URL or a local file, as far as the policy allows.

A URL's host is looked up once, every address is checked, and the connection goes to a checked address: at every
redirect anew. No proxies, cookies or content encodings. Blocks; for threads that may wait.
"""

from __future__ import annotations

import binascii
import contextlib
import functools
import os
import re
import socket
import ssl
import stat
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any

import httpcore
import httpx

import mstar
from mstar.errors import RequestError
from mstar.media.policy import Budget, MediaPolicy

# The whole grammar: one reading only, so that no second parser can see another host in it.
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9a-f:.]{2,45}\]|[a-z0-9._-]{1,253})(:(?P<port>[0-9]{1,5}))?"
    r"(?P<target>[/?][!-\[\]-~]*)?",
    re.ASCII | re.IGNORECASE,
)
_IPV4 = re.compile(r"((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])(\.(?!$)|$)){4}")
_NAME = re.compile(r"([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*(?!0x)[a-z_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_MAX_URL = 8192
_REDIRECTS = (301, 302, 303, 307, 308)
_FAULTS = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, httpcore.UnsupportedProtocol)
_RESOLVERS = ThreadPoolExecutor(8, thread_name_prefix="mstar-resolve")  # a lookup itself knows no deadline


def read_source(source: str, *, budget: Budget, base: Path | None = None, param: str | None = None) -> bytes:
    """The bytes that a part's `data` stands for.

    Args:
        base: folder that relative names start from, where a user names files of their own; None: a client asks, and
            gets what lies below the policy's folder.

    Raises RequestError, which never says what the policy keeps from clients: whether a file exists, or what a host that
    may not be asked is or would have answered.
    """
    scheme = source[:8].lower()
    if scheme.startswith("data:"):
        return read_data_uri(source, param=param)
    if scheme.startswith(("http:", "https:")):
        return _fetch(source, budget=budget, param=param)
    return _read_file(source, policy=budget.policy, base=base, param=param)


def read_data_uri(uri: str, *, param: str | None = None) -> bytes:
    """The bytes of a base64 data URI. Raises RequestError for anything else; the media type is not looked at."""
    head, comma, payload = uri.partition(",")
    if not comma or not head[:5].lower() == "data:" or not head.endswith(";base64"):
        raise RequestError("expected a data URI in base64, as 'data:image/png;base64,...'", param=param)
    try:
        return binascii.a2b_base64(payload, strict_mode=True)
    except ValueError as error:  # binascii's, or of text that is not ASCII
        raise RequestError(f"the data URI is not valid base64: {error}", param=param) from error


def _check_size(num_bytes: int, *, policy: MediaPolicy, param: str | None) -> None:
    if num_bytes > policy.max_bytes:
        message = f"{param} has more than {policy.max_bytes} bytes, which is the limit of a file or download; "
        raise RequestError(message + "send less, or raise --max-media-bytes", param=param, code="media_too_large")


# ---- files ------------------------------------------------------------------------------------------------------


def _read_file(name: str, *, policy: MediaPolicy, base: Path | None, param: str | None) -> bytes:
    name = urllib.parse.unquote(name.partition("://")[2]) if name[:7].lower() == "file://" else name
    try:
        if base is not None:
            return _read_own(base / Path(name).expanduser(), policy=policy, param=param)
        if policy.allowed_local_path is not None:
            return _read_below(policy.allowed_local_path, name, policy=policy, param=param)
    except (OSError, ValueError, RuntimeError) as error:  # missing, a NUL in it, a circle of links
        if base is not None:
            raise RequestError(f"{param} is {name[:200]!r}: there is no such file to read", param=param) from error
    wanted = "give a data URI, as 'data:image/png;base64,...', or a URL; "
    wanted += "files are read below the folder of --allowed-local-media-path only"
    raise RequestError(f"{param} names no file that this server reads; {wanted}", param=param, code="media_refused")


def _read_own(path: Path, *, policy: MediaPolicy, param: str | None) -> bytes:
    if not path.is_file():
        raise FileNotFoundError
    _check_size(path.stat().st_size, policy=policy, param=param)
    return path.read_bytes()


def _read_below(folder: Path, name: str, *, policy: MediaPolicy, param: str | None) -> bytes:
    """A regular file below `folder`. Raises OSError or ValueError for everything else, there or not."""
    steps = (folder / name).resolve().relative_to(folder).parts
    # What is resolved holds no links: they are not followed, so that none can be put there meanwhile.
    at = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for number, step in enumerate(steps, 1):
        kind = os.O_RDONLY | os.O_NONBLOCK if number == len(steps) else os.O_PATH | os.O_DIRECTORY
        try:
            inner = os.open(step, kind | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
        at = inner
    try:
        found = os.fstat(at)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError
        _check_size(found.st_size, policy=policy, param=param)
        with open(at, "rb", closefd=False) as file:
            data = file.read(policy.max_bytes + 1)
    finally:
        os.close(at)
    _check_size(len(data), policy=policy, param=param)
    return data


# ---- URLs -------------------------------------------------------------------------------------------------------


def _fetch(url: str, *, budget: Budget, param: str | None) -> bytes:
    for _ in range(budget.policy.max_redirects + 1):
        answer = _get(_parsed(url, policy=budget.policy, param=param), budget=budget, param=param)
        if isinstance(answer, bytes):
            return answer
        with contextlib.suppress(ValueError):  # what cannot be joined is refused as it is
            answer = urllib.parse.urljoin(url, answer)
        url = answer
    message = f"{param}: the URL redirects more than {budget.policy.max_redirects} times; give the address it leads to"
    raise RequestError(message, param=param, code="media_unreachable")


def _parsed(url: str, *, policy: MediaPolicy, param: str | None) -> httpcore.URL:
    """A URL that may be asked. Raises RequestError for any other."""
    found = _URL.fullmatch(url.partition("#")[0]) if len(url) <= _MAX_URL else None
    host = "" if found is None else found["host"].lower()
    port = int((found and found["port"]) or (443 if found and found["scheme"].lower() == "https" else 80))
    if found is None or not (host[0] == "[" or _IPV4.fullmatch(host) or _NAME.fullmatch(host)) or not 0 < port < 65536:
        message = f"{param} is no URL that is fetched: expected http(s)://host[:port]/path in at most {_MAX_URL} "
        message += "visible ASCII characters, without user name or backslash, addresses as 192.0.2.1 or [2001:db8::1]"
        raise RequestError(message, param=param, code="media_refused")
    if not policy.allows_host(host.strip("[]")):
        message = f"{param}: media are not fetched from {host[:100]!r}; send the data itself, as a data URI, "
        message += "or have the server allow the host with --allowed-media-domains"
        raise RequestError(message, param=param, code="media_refused")
    target = found["target"] or "/"
    target = target if target[0] == "/" else "/" + target
    return httpcore.URL(scheme=found["scheme"].lower(), host=host.strip("[]"), port=port, target=target)


def _get(url: httpcore.URL, *, budget: Budget, param: str | None) -> bytes | str:
    """The body of one answer, or where it redirects to."""
    network = _Checked(budget, param=param)
    host = url.host.decode()
    try:
        with httpcore.ConnectionPool(_tls() if url.scheme == b"https" else None, network_backend=network) as pool:
            headers: dict[bytes | str, bytes | str] = {"Accept-Encoding": "identity", "Host": _host_header(url)}
            headers |= {"User-Agent": f"mstar/{mstar.__version__}", "Accept": "*/*"}
            with pool.stream("GET", url, headers=headers) as response:
                given = {name.lower(): value.decode("latin-1") for name, value in response.headers}
                if response.status in _REDIRECTS and b"location" in given:
                    return given[b"location"]
                if response.status != 200 or given.get(b"content-encoding", "identity") != "identity":
                    what = f"status {response.status}" if response.status != 200 else "a Content-Encoding"
                    message = f"{param}: {host!r} answered with {what}; only a plain 200 gives media"
                    raise RequestError(message, param=param, code="media_unreachable")
                length = given.get(b"content-length", "0")
                _check_size(int(length) if length.isdecimal() else 0, policy=budget.policy, param=param)
                return _body(response.iter_stream(), budget=budget, param=param)
    except _FAULTS as error:
        budget.left_s(param)
        message = f"{param} could not be fetched from {host!r} ({type(error).__name__}); see that it can be reached"
        raise RequestError(message, param=param, code="media_unreachable") from error


def _body(blocks: Iterator[bytes], *, budget: Budget, param: str | None) -> bytes:
    body = bytearray()
    for block in blocks:
        body += block
        _check_size(len(body), policy=budget.policy, param=param)
    return bytes(body)


def _host_header(url: httpcore.URL) -> str:
    host = url.host.decode()
    host = f"[{host}]" if ":" in host else host
    return host if url.port == {b"http": 80, b"https": 443}[url.scheme] else f"{host}:{url.port}"


@functools.cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()


class _Checked(httpcore.SyncBackend):
    """Looks a host up once and connects to an address that may be asked; nothing waits longer than there is time."""

    def __init__(self, budget: Budget, *, param: str | None) -> None:
        self._budget = budget
        self._param = param

    def connect_tcp(self, host: str, port: int, *arguments: Any, **named: Any) -> httpcore.NetworkStream:
        """A connection to the first address that answers; to none if any may not be asked."""
        addresses = self._addresses(host, port)
        if not addresses or not all(map(self._budget.policy.allows_address, addresses)):
            message = (
                f"{self._param}: {host!r} was not found at a public address; send the data itself, as a data URI, "
            )
            message += "or have the server allow its address, beside its name, with --allowed-media-domains"
            raise RequestError(message, param=self._param, code="media_refused")
        for address in addresses[:-1]:
            try:
                return self._connect(address, port)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return self._connect(addresses[-1], port)

    def _connect(self, address: str, port: int) -> httpcore.NetworkStream:
        return _Timed(super().connect_tcp(address, port, self._budget.left_s(self._param)), self._budget, self._param)

    def _addresses(self, host: str, port: int) -> list[str]:
        looking = _RESOLVERS.submit(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            found = looking.result(self._budget.left_s(self._param))
        except FutureTimeoutError:
            looking.cancel()
            self._budget.left_s(self._param)  # says that the time is over
            return []
        except (OSError, UnicodeError):
            return []
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Timed(httpcore.NetworkStream):
    """A connection, each of whose steps may take what is left of the budget."""

    def __init__(self, stream: httpcore.NetworkStream, budget: Budget, param: str | None) -> None:
        self._stream = stream
        self._budget = budget
        self._param = param

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, self._budget.left_s(self._param))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, self._budget.left_s(self._param))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left_s = self._budget.left_s(self._param)
        return _Timed(self._stream.start_tls(ssl_context, server_hostname, left_s), self._budget, self._param)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
