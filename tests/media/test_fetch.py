"""What is fetched and read, and above all what is not: cases 20 and 22 of the known faults, at the module's edge."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from media_files import Listener, data_uri, listening, response

from mstar.config import EngineConfig
from mstar.errors import RequestError
from mstar.media import fetch
from mstar.media.fetch import read_data_uri, read_source
from mstar.media.policy import Budget, MediaPolicy

OPEN = MediaPolicy(allowed_domains=("*", "127.0.0.1"))
"""Every public host, and this machine."""


def read(source: str, policy: MediaPolicy = OPEN, **options: Any) -> bytes:
    return read_source(source, budget=Budget(policy), param="inputs.0.data", **options)


def refusal(source: str, policy: MediaPolicy = OPEN, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(source, policy, **options)
    assert caught.value.status == 400 and caught.value.param == "inputs.0.data"
    assert "inputs.0.data" in caught.value.message and len(caught.value.message) < 600
    return caught.value


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Make names resolve to addresses; gives the list of names that were asked for."""
    known = socket.getaddrinfo
    asked: list[str] = []

    def use(**names: list[str]) -> list[str]:
        def getaddrinfo(host: str, port: int, *args: Any, **named: Any) -> Any:
            if host[0].isdigit() or ":" in host:
                return known(host, port, *args, **named)
            asked.append(host)
            if host not in names:
                raise socket.gaierror(-2, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in names[host]]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        return asked

    return use


@pytest.fixture
def no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*args: Any, **named: Any) -> Any:
        raise AssertionError(f"a connection to {args}")

    monkeypatch.setattr(socket, "create_connection", connect)


# ---- URLs that are fetched ------------------------------------------------------------------------------------------


def test_a_url_gives_the_body_and_the_request_is_plain() -> None:
    with listening(response(b"media")) as host:
        assert read(f"HTTP://127.0.0.1:{host.port}/a%20b?c=/d#e") == b"media"
        head = host.requests[0].decode()
    assert head.startswith("GET /a%20b?c=/d HTTP/1.1\r\n") and f"Host: 127.0.0.1:{host.port}\r\n" in head
    assert "identity" in head and "cookie" not in head.lower()


def test_a_name_is_looked_up_once_and_connected_to_at_the_address_that_was_checked(
    resolve: Callable[..., list[str]],
) -> None:
    asked = resolve(**{"media.example": ["127.0.0.1"]})
    policy = MediaPolicy(allowed_domains=("media.example", "127.0.0.0/8"))
    with listening(response(b"media")) as host:
        assert read(f"http://media.example:{host.port}/x", policy) == b"media"
        assert f"Host: media.example:{host.port}".encode() in host.requests[0]
    assert asked == ["media.example"]


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See", "307 Temporary", "308 Permanent"])
def test_redirects_are_followed_where_they_may_lead(status: str) -> None:
    with listening(response(b"media")) as target:
        location = f"http://127.0.0.1:{target.port}/there"
        with listening(response(status=status, Location=location)) as host:
            assert read(f"http://127.0.0.1:{host.port}/") == b"media"
        assert target.requests[0].startswith(b"GET /there ")


def test_https_checks_the_name_and_not_the_address(
    resolve: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-subj"]
    command += ["/CN=media.example", "-addext", "subjectAltName=DNS:media.example"]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    monkeypatch.setattr(fetch, "_tls", lambda: ssl.create_default_context(cafile=certificate))
    resolve(**{"media.example": ["127.0.0.1"], "other.example": ["127.0.0.1"]})
    policy = MediaPolicy(allowed_domains=("*", "127.0.0.1"))
    with listening(response(b"media"), tls=context) as host:
        assert read(f"https://media.example:{host.port}/", policy) == b"media"
        for name in ("other.example", "127.0.0.1"):
            assert refusal(f"https://{name}:{host.port}/", policy).code == "media_unreachable"
        assert len(host.requests) == 1


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as proxy, listening(response(b"media")) as host:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert read(f"http://127.0.0.1:{host.port}/") == b"media"
        assert proxy.num_connections == 0


# ---- URLs that are not ----------------------------------------------------------------------------------------------

PRIVATE = [
    "127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
    "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1",
    "fd00::1", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b:1::1", "2002:7f00:1::", "2001:0:1::1", "2001:db8::1",
]  # fmt: skip


@pytest.mark.usefixtures("no_connections")
@pytest.mark.parametrize("address", PRIVATE)
@pytest.mark.parametrize("domains", [("*",), ("media.example",), ("*.example", "media.example")])
def test_no_address_that_is_not_public_is_connected_to(
    resolve: Callable[..., list[str]], address: str, domains: tuple[str, ...]
) -> None:
    resolve(**{"media.example": [address], "both.example": ["93.184.215.14", address]})
    policy = MediaPolicy(allowed_domains=domains)
    literal = f"[{address}]" if ":" in address else address
    for host in (literal, "media.example", "both.example"):
        error = refusal(f"http://{host}/latest/meta-data", policy)
        assert error.code == "media_refused" and "--allowed-media-domains" in error.message
        assert address not in error.message or host == literal


@pytest.mark.parametrize("address", ["8.8.8.8", "93.184.215.14", "2606:4700::1111"])
def test_public_addresses_pass(address: str) -> None:
    policy = MediaPolicy(allowed_domains=("*",))
    assert policy.allows_host(address) and policy.allows_address(address)
    assert not MediaPolicy().allows_host(address) and not MediaPolicy(allowed_domains=("x.org",)).allows_host(address)


def test_addresses_that_the_operator_names_are_reached() -> None:
    policy = MediaPolicy(allowed_domains=("minio.example", "10.1.0.0/16", "fd00::5"))
    assert policy.allows_host("10.1.2.3") and policy.allows_address("10.1.2.3") and policy.allows_address("fd00::5")
    assert not policy.allows_host("10.2.0.1") and not policy.allows_address("10.2.0.1")
    assert not policy.allows_host("8.8.8.8")


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [("a.org", True), ("x.a.org", False), ("b.org", False), ("x.b.org", True), ("y.x.b.org", True), ("xb.org", False)],
)
def test_names_match_whole_or_by_parent(host: str, is_allowed: bool) -> None:
    assert MediaPolicy(allowed_domains=("a.org", "*.b.org")).allows_host(host) == is_allowed


ODD = [
    "http://127.0.0.1:{port}/", "http://2130706433:{port}/", "http://0177.0.0.1:{port}/", "http://0x7f.0.0.1:{port}/",
    "http://0x7f000001:{port}/", "http://127.1:{port}/", "http://127.0.0.1.:{port}/", "http://localhost:{port}/",
    "http://LOCALHOST:{port}/", "http://[::1]:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "http://0:{port}/",
    "http://media.example\\@127.0.0.1:{port}/", "http://media.example@127.0.0.1:{port}/",
    "http://media.example:x@127.0.0.1:{port}/", "http://127.0.0.1:{port}\\@media.example/",
    "http://127.0.0.1:{port}#@media.example/", "http://media.example#@127.0.0.1:{port}/",
    "http://127.0.0.1%2f@media.example:{port}/", "http://127.0.0.1:{port}\t/", "http://127.0.0.1:{port}/\r\nX: y",
    "http://127.0.0.1:{port}/ x", "http:127.0.0.1:{port}/", "http:/127.0.0.1:{port}/", "http:///127.0.0.1:{port}/",
    "http://media.exampleſ/", "httpſ://127.0.0.1:{port}/",
    "http://①②⑦.0.0.1:{port}/", "http://127。0。0。1:{port}/", "http://media.example:99999/", "http://media.example:0/",
    "http://", "http://:{port}/", "http://[::1/", "http://[v1.x]:{port}/", "http://[fe80::1%25lo]:{port}/",
    "https://127.0.0.1:{port}/", "ftp://127.0.0.1:{port}/", "gopher://127.0.0.1:{port}/", "//127.0.0.1:{port}/",
    "http://media.example/" + "x" * 9000, " http://127.0.0.1:{port}/", "http://-x.example:{port}/",
]  # fmt: skip


@pytest.mark.parametrize("url", ODD)
@pytest.mark.parametrize("domains", [(), ("*",), ("media.example",)])
def test_odd_urls_reach_nobody(resolve: Callable[..., list[str]], url: str, domains: tuple[str, ...]) -> None:
    resolve(localhost=["127.0.0.1"])
    with listening(response(b"secret")) as canary:
        refusal(url.format(port=canary.port), MediaPolicy(allowed_domains=domains))
        time.sleep(0.01)
        assert canary.num_connections == 0


def test_without_a_list_nothing_is_even_looked_up(resolve: Callable[..., list[str]]) -> None:
    asked = resolve(**{"media.example": ["93.184.215.14"]})
    assert "--allowed-media-domains" in refusal("http://media.example/x.png", MediaPolicy()).message
    assert asked == []


INWARD = [
    "http://127.0.0.2:{port}/", "//127.0.0.2:{port}/", "http://[::1]:{port}/", "http://localhost:{port}/", "file:///etc/hostname",
    "http://2130706434:{port}/", "http://allowed\\@127.0.0.2:{port}/", "data:image/png;base64,aGk=", "/etc/hostname\\x",
    "http://[::1/", "http\u017f://127.0.0.2:{port}/", "http://[x]/", "ftp://127.0.0.2:{port}/", "http://inward.example:{port}/",
]  # fmt: skip


@pytest.mark.parametrize("location", INWARD)
def test_a_redirect_is_checked_as_a_url_of_its_own(resolve: Callable[..., list[str]], location: str) -> None:
    resolve(localhost=["127.0.0.2"], **{"inward.example": ["127.0.0.2"]})
    with listening(response(b"secret"), host="127.0.0.2") as canary:
        answer = response(status="302 Found", Location=location.format(port=canary.port))
        with listening(answer) as host:
            error = refusal(f"http://127.0.0.1:{host.port}/", MediaPolicy(allowed_domains=("*", "127.0.0.1")))
            assert host.num_connections == 1 and "secret" not in error.message
        time.sleep(0.01)
        assert canary.num_connections == 0


def test_redirects_end() -> None:
    with listening(response(status="302 Found", Location="/again")) as host:
        error = refusal(f"http://127.0.0.1:{host.port}/")
        assert "redirects more than 5 times" in error.message and host.num_connections == 6


def test_a_name_that_changes_its_address_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """DNS rebinding: the second answer is never asked for."""
    answers = iter(["93.184.215.14", "127.0.0.1", "127.0.0.1"])
    connected: list[Any] = []

    def getaddrinfo(host: str, port: int, *args: Any, **named: Any) -> Any:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    def connect(address: Any, *args: Any, **named: Any) -> Any:
        connected.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "create_connection", connect)
    assert refusal("http://rebind.example/", MediaPolicy(allowed_domains=("*",))).code == "media_unreachable"
    assert connected == [("93.184.215.14", 80)]


@pytest.mark.parametrize(
    "status", ["404 Not Found", "500 Oops", "206 Partial", "204 None", "101 Switching", "302 Found"]
)
def test_any_other_answer_is_told(status: str) -> None:
    with listening(response(b"text", status=status)) as host:
        error = refusal(f"http://127.0.0.1:{host.port}/")
    assert error.code == "media_unreachable"
    assert "101" in status or f"status {status[:3]}" in error.message


@pytest.mark.parametrize(
    "answer", [b"", b"nonsense\r\n\r\n", response(b"short", Content_Length="100"), b"HTTP/1.1 200 OK\r\n"]
)
def test_broken_answers_are_told(answer: bytes) -> None:
    with listening(answer) as host:
        assert refusal(f"http://127.0.0.1:{host.port}/").code == "media_unreachable"


def test_a_closed_port_and_an_unknown_name_are_told(resolve: Callable[..., list[str]]) -> None:
    resolve()
    with listening() as host:
        port = host.port
    assert refusal(f"http://127.0.0.1:{port}/").code == "media_unreachable"
    assert "not found at a public address" in refusal("http://nowhere.example/").message


def test_content_encodings_are_refused() -> None:
    with listening(response(b"x", Content_Encoding="gzip")) as host:
        assert "Content-Encoding" in refusal(f"http://127.0.0.1:{host.port}/").message


@pytest.mark.parametrize("length", [None, "5000"])
def test_bytes_are_capped_by_what_is_said_and_by_what_comes(length: str | None) -> None:
    policy = MediaPolicy(allowed_domains=("127.0.0.1",), max_bytes=4096)
    plain = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"x" * 5000
    with listening(plain if length is None else response(b"", Content_Length=length)) as host:
        error = refusal(f"http://127.0.0.1:{host.port}/", policy)
    assert "more than 4096 bytes" in error.message and "--max-media-bytes" in error.message


class Dripping(Listener):
    """Sends a byte now and then, for ever."""

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            try:
                for at in range(10_000):
                    connection.sendall(self._answer[at : at + 1] or b"x")
                    time.sleep(0.02)
            except OSError:
                pass


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["head", "body"])
def test_the_time_is_capped_however_slowly_bytes_come(answer: bytes) -> None:
    host = Dripping(answer)
    started = time.monotonic()
    error = refusal(f"http://127.0.0.1:{host.port}/", MediaPolicy(allowed_domains=("127.0.0.1",), timeout_s=0.6))
    assert time.monotonic() - started < 2 and "--media-timeout" in error.message
    host.close()


def test_a_host_that_never_answers_ends_with_the_request() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    started = time.monotonic()
    budget = Budget(OPEN, deadline=started + 0.4)
    with pytest.raises(RequestError, match="--media-timeout"):
        read_source(f"http://127.0.0.1:{silent.getsockname()[1]}/", budget=budget, param="p")
    assert time.monotonic() - started < 2
    silent.close()


def test_a_slow_lookup_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **named: over.wait(5) and [])
    started = time.monotonic()
    refusal("http://slow.example/", MediaPolicy(allowed_domains=("*",), timeout_s=0.3))
    assert time.monotonic() - started < 2
    over.set()


# ---- data URIs and files --------------------------------------------------------------------------------------------


def test_data_uris_are_read_strictly() -> None:
    assert read_data_uri(data_uri(b"abc", "audio/wav")) == read(data_uri(b"abc").replace("data:", "DATA:")) == b"abc"
    for bad in (
        "abc",
        "data:audio/wav,abc",
        "data:audio/wav;base64,a b=",
        "http://host/x.wav",
        "data:;base64,é",
        "data:",
    ):
        with pytest.raises(RequestError):
            read_data_uri(bad)


@pytest.fixture
def jail(tmp_path: Path) -> Path:
    """A folder with files that may be read, beside one that may not."""
    folder = tmp_path / "media"
    (folder / "inner").mkdir(parents=True)
    (folder / "a b.png").write_bytes(b"inside")
    (folder / "inner" / "c.png").write_bytes(b"deeper")
    (folder / "link.png").symlink_to("inner/c.png")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "out.png").symlink_to(tmp_path / "secret.png")
    (folder / "up").symlink_to(tmp_path)
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "pipe")
    (tmp_path / "media-too").mkdir()
    (tmp_path / "media-too" / "d.png").write_bytes(b"beside")
    return folder


def test_files_below_the_allowed_folder_are_read(jail: Path) -> None:
    policy = MediaPolicy(allowed_local_path=jail)
    for name in (
        f"{jail}/a b.png",
        f"file://{jail}/a%20b.png",
        "a b.png",
        "./inner/../a b.png",
        f"FILE://{jail}/a b.png",
    ):
        assert read(name, policy) == b"inside"
    assert read("link.png", policy) == read("inner/c.png", policy) == b"deeper"


OUTSIDE = [
    "/etc/hostname", "file:///etc/hostname", "/no/such/file", "../secret.png", "{jail}/../secret.png", "out.png",
    "up/secret.png", "file://{jail}/%2e%2e/secret.png", "file://{jail}/..%2fsecret.png",
    "file://{jail}/%2e%2e%2fsecret.png", "{jail}-too/d.png", "circle", "pipe", "inner", ".", "", "a b.png\0",
    "missing.png", "/dev/zero", "/proc/self/environ", "file://host/etc/hostname", "~/x",
    "inner/" + "x" * 300, "%2e%2e/secret.png", "file://localhost/etc/hostname",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_everything_else_is_refused_in_the_same_words_whether_it_exists_or_not(jail: Path, name: str) -> None:
    name = name.format(jail=jail)
    for policy in (MediaPolicy(), MediaPolicy(allowed_local_path=jail)):
        error = refusal(name, policy)
        assert error.message == refusal("/surely/not/there", policy).message
        assert "--allowed-local-media-path" in error.message and str(jail) not in error.message


def test_no_refusal_leaves_a_file_open(jail: Path) -> None:
    policy = MediaPolicy(allowed_local_path=jail)
    before = len(os.listdir("/proc/self/fd"))
    for name in OUTSIDE:
        refusal(name.format(jail=jail), policy)
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_that_are_too_large_are_not_read(jail: Path) -> None:
    policy = MediaPolicy(allowed_local_path=jail, max_bytes=3)
    assert "--max-media-bytes" in refusal("a b.png", policy).message
    assert "--max-media-bytes" in refusal("a b.png", policy, base=jail).message


def test_offline_users_name_any_file_of_theirs(jail: Path) -> None:
    assert read("../secret.png", base=jail) == read(f"file://{jail}/up/secret.png", base=jail) == b"secret"
    assert "there is no such file" in refusal("missing.png", base=jail).message
    assert "there is no such file" in refusal("pipe", base=jail).message


# ---- settings -------------------------------------------------------------------------------------------------------


def test_offline_public_hosts_need_no_list() -> None:
    config = EngineConfig(plugin="echo")
    assert MediaPolicy.of(config).allowed_domains == ()
    assert MediaPolicy.of(config, is_offline=True).allowed_domains == ("*",)
    assert MediaPolicy() == MediaPolicy.of(config)
