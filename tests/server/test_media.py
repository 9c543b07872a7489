"""Media in requests over HTTP: what decoded parts arrive at the model, and cases 16, 18, 20, 21 and 22 from outside."""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from media_files import (
    animation,
    clip,
    data_uri,
    gradient,
    image_file,
    listening,
    png_of_one_colour,
    png_with_bad_checksum,
    response,
    tiff_bomb,
)
from serve_process import ServeProcess
from served import Served, wait_until

from mstar import client
from mstar.cli import main
from mstar.media.audio import encode_wav

WAV = encode_wav(np.linspace(-1, 1, 800, dtype=np.float32), sample_rate=8000)
CLIP = clip()
FILES = {"image": image_file(), "audio": WAV, "video": CLIP}
KINDS = tuple(FILES)


class Site:
    def __init__(self, url: str, folder: Path) -> None:
        self.http = httpx.Client(base_url=url, timeout=60)
        self.folder = folder

    def ask(self, *inputs: Any, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/generate", json={"task": "media", "inputs": list(inputs)} | fields)

    def facts(self, *inputs: Any) -> list[int]:
        answer = self.ask(*inputs)
        assert answer.status_code == 200, answer.text
        (output,) = answer.json()["outputs"]
        return np.frombuffer(base64.b64decode(output["data"]), dtype="<i8").tolist()

    def refusal(self, *inputs: Any, param: str = "inputs.0.data") -> dict[str, Any]:
        answer = self.ask(*inputs)
        error: dict[str, Any] = answer.json()["error"]
        assert answer.status_code == 400, answer.text
        assert error["param"] == param and error["type"] == "invalid_request_error", error
        return error


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Media that may be named, beside media that may not."""
    top = tmp_path_factory.mktemp("files")
    (top / "media").mkdir()
    for kind, data in FILES.items():
        (top / "media" / kind).write_bytes(data)
        (top / f"secret-{kind}").write_bytes(data)
        (top / "media" / f"out-{kind}").symlink_to(top / f"secret-{kind}")
    return top / "media"


def started(folder: Path, **settings: Any) -> Iterator[Site]:
    served = Served(plugin="echo", max_num_seqs=8, **settings)
    try:
        with served.http(max_body_bytes=2**24) as url:
            yield Site(url, folder)
            wait_until(lambda: served.is_idle)
        served.assert_clean()
    finally:
        served.close()


@pytest.fixture(scope="module")
def closed(folder: Path) -> Iterator[Site]:
    """As servers are by default: nothing is fetched, no file is read."""
    yield from started(folder)


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Site]:
    """One address of this machine, all public hosts, and one folder."""
    domains = ("127.0.0.1", "*", "allowed.example")
    yield from started(folder, allowed_media_domains=domains, allowed_local_media_path=str(folder), media_timeout_s=8.0)


@pytest.fixture(params=["closed", "opened"])
def site(request: pytest.FixtureRequest) -> Site:
    found: Site = request.getfixturevalue(request.param)
    return found


def part(kind: str, source: bytes | str) -> dict[str, Any]:
    return {"type": kind, "data": data_uri(source) if isinstance(source, bytes) else source}


def crc(array: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(array).tobytes())


# ---- what arrives ---------------------------------------------------------------------------------------------------


def test_parts_arrive_decoded_and_in_order(closed: Site) -> None:
    image, text = part("image", FILES["image"]), {"type": "text", "text": "hi"}
    found = closed.facts(image, text, part("audio", WAV), part("video", CLIP) | {"num_frames": 3}, image)
    picture = [20, 30, 3, crc(gradient())]
    assert found[:6] == [*picture, 2, zlib.crc32(b"hi")] and found[-4:] == picture
    assert found[6:9] == [8000, 1, 800] and found[10:15] == [5900, 3, 48, 64, 3]


@pytest.mark.parametrize(
    ("fields", "num", "last_ms"), [({}, 60, 5900), ({"fps": 2}, 12, 5500), ({"frame_indices": [7, 3]}, 2, 300)]
)
def test_videos_are_sampled(closed: Site, fields: dict[str, Any], num: int, last_ms: int) -> None:
    assert closed.facts(part("video", CLIP) | fields)[:2] == [last_ms, num]


def test_the_client_makes_all_kinds_of_parts(closed: Site, folder: Path) -> None:
    from PIL import Image

    picture = [20, 30, 3, crc(gradient())]
    for source in (gradient(), Image.fromarray(gradient()), FILES["image"], folder / "image", data_uri(FILES["image"])):
        assert closed.facts(client.image(source)) == picture
    frames = np.stack([gradient(), 255 - gradient()])
    assert closed.facts(client.video(frames, fps=4)) == [250, 2, 20, 30, 3, crc(frames)]
    assert closed.facts(client.video(folder / "video", num_frames=2))[:2] == [5900, 2]
    assert closed.facts(client.media("audio", WAV))[:3] == [8000, 1, 800]
    with pytest.raises(TypeError, match=r"pathlib\.Path"):
        client.image("cat.png")


@pytest.mark.parametrize("kind", KINDS)
def test_urls_and_files_arrive_where_they_are_allowed(opened: Site, kind: str) -> None:
    expected = opened.facts(part(kind, FILES[kind]))
    with listening(response(FILES[kind], Content_Type="text/plain")) as host:
        assert opened.facts(part(kind, f"http://127.0.0.1:{host.port}/x")) == expected
    for name in (kind, f"{opened.folder}/{kind}", f"file://{opened.folder}/{kind}"):
        assert opened.facts(part(kind, name)) == expected


BAD_VIDEOS: list[tuple[dict[str, Any], str]] = [
    ({}, "inputs.0"),
    ({"data": "data:,", "frames": {}}, "inputs.0"),
    ({"data": "data:,", "fps": 0}, "inputs.0.fps"),
    ({"data": "data:,", "num_frames": 0}, "inputs.0.num_frames"),
    ({"data": "data:,", "frame_indices": []}, "inputs.0.frame_indices"),
    ({"data": "data:,", "frame_indices": [-1]}, "inputs.0.frame_indices.0"),
    ({"data": "data:,", "frame_indices": [1], "fps": 1}, "inputs.0.frame_indices"),
    ({"data": data_uri(CLIP), "frame_indices": [60]}, "inputs.0.frame_indices"),
    ({"data": data_uri(CLIP), "speed": 2}, "inputs.0.speed"),
    ({"frames": client.tensor("", np.zeros((1, 2, 2, 3), np.uint8))["tensor"]}, "inputs.0.fps"),
    ({"frames": client.tensor("", np.zeros((1, 2, 2, 3), np.float32))["tensor"], "fps": 1}, "inputs.0.frames"),
    ({"frames": client.tensor("", np.zeros((0, 2, 2, 3), np.uint8))["tensor"], "fps": 1}, "inputs.0.frames"),
    ({"frames": client.tensor("", np.zeros((1, 2, 2, 3), np.uint8))["tensor"], "num_frames": 1}, "inputs.0.num_frames"),
    *(
        ({"frames": client.tensor("", np.zeros((4, 2, 2, 3), np.uint8))["tensor"], "fps": fps}, "inputs.0.fps")
        for fps in (1e-3, 1e-30, 5e-324)
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD_VIDEOS)
def test_videos_that_make_no_sense_are_refused(closed: Site, fields: dict[str, Any], param: str) -> None:
    closed.refusal({"type": "video", **fields}, param=param)


def test_tasks_that_take_no_media_say_so(closed: Site) -> None:
    for kind in KINDS:
        body = {"task": "generate", "inputs": [part(kind, FILES[kind])]}
        error = closed.http.post("/v1/generate", json=body).json()["error"]
        assert error["param"] == "inputs.0" and f"no {kind} part; known: text" in error["message"]


def test_the_document_describes_the_parts(closed: Site) -> None:
    schemas = closed.http.get("/openapi.json").json()["components"]["schemas"]
    assert {"ImageInput", "AudioInput", "VideoInput"} <= set(schemas)
    assert {"data", "frames", "fps", "num_frames", "frame_indices"} <= set(schemas["VideoInput"]["properties"])


# ---- 16: decompression bombs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process() -> Iterator[ServeProcess]:
    with ServeProcess("--plugin", "echo", "--max-model-len", "128", "--max-num-seqs", "4") as found:
        yield found


@pytest.fixture(scope="module")
def bombs() -> dict[str, str]:
    return {
        "png 40000": data_uri(png_of_one_colour(40_000, 40_000)),
        "png 12000": data_uri(png_of_one_colour(12_000, 12_000)),
        "gif": data_uri(animation("GIF", 10_000)),
        "webp": data_uri(animation("WEBP", 10_000)),
        "tiff": data_uri(tiff_bomb(100_000, 100_000)),
    }


def timed(http: httpx.Client, *inputs: Any) -> tuple[int, float]:
    body = json.dumps({"task": "media", "inputs": list(inputs)})
    started = time.monotonic()
    answer = http.post("/v1/generate", content=body, headers={"Content-Type": "application/json"})
    return answer.status_code, time.monotonic() - started


@pytest.fixture
def http(process: ServeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=process.url, timeout=60, verify=False) as found:
        yield found


def test_bombs_are_refused_at_once_and_leave_nothing(
    process: ServeProcess, http: httpx.Client, bombs: dict[str, str]
) -> None:
    assert timed(http, part("image", FILES["image"]))[0] == 200
    before = process.resident_bytes
    for name, data in bombs.items():
        for kind in KINDS:
            status, seconds = timed(http, part(kind, data))
            assert status == 400 and seconds < 1, (kind, name, status, seconds)
    assert process.resident_bytes - before < 100 * 1024**2


@pytest.mark.parametrize("kind", ["image", "video"])
def test_small_requests_pass_sixteen_bombs(http: httpx.Client, bombs: dict[str, str], kind: str) -> None:
    def small() -> float:
        status, seconds = timed(http, {"type": "text", "text": "hi"})
        assert status == 200
        return seconds

    bomb = part(kind, bombs["png 40000" if kind == "image" else "gif"])
    alone = sorted(small() for _ in range(9))[4]
    beside: list[float] = []
    with ThreadPoolExecutor(16) as pool:
        flying = [pool.submit(timed, http, bomb) for _ in range(16)]
        while not all(one.done() for one in flying):
            beside.append(small())
    assert {one.result()[0] for one in flying} == {400}
    assert sorted(beside)[len(beside) // 2] < alone + 0.5, (alone, beside)


# ---- 18: damaged files ----------------------------------------------------------------------------------------------

DAMAGED: dict[str, str] = {
    "jpeg cut": data_uri(image_file(kind="JPEG")[:-128], "image/jpeg"),
    "empty": data_uri(b"", "image/png"),
    "text": data_uri(b"hello, I am a PNG", "image/png"),
    "no comma": "data:image/png;base64",
    "no base64": "data:image/png;base64,####",
    "not base64": "data:image/png,hello",
    "bad crc": data_uri(png_with_bad_checksum(), "image/png"),
    "clip cut": data_uri(CLIP[:-1000]),
    "wav header": data_uri(WAV[:30]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_the_clients_fault(closed: Site, kind: str, name: str) -> None:
    assert closed.refusal(part(kind, DAMAGED[name]))["message"]


def test_a_wrong_label_on_a_right_file_is_accepted(closed: Site) -> None:
    assert closed.facts(part("image", data_uri(FILES["image"], "image/jpeg")))[:3] == [20, 30, 3]


# ---- 20, 21: no way inward, by any field ----------------------------------------------------------------------------

INWARD = [
    "http://127.0.0.2:{port}/", "http://[::1]:{port}/", "http://169.254.169.254/latest/meta-data/", "http://2130706434:{port}/",
    "http://0177.0.0.2:{port}/", "http://0x7f000002:{port}/", "http://127.2:{port}/", "http://localhost:{port}/",
    "http://allowed.example\\@127.0.0.2:{port}/", "http://allowed.example@127.0.0.2:{port}/", "HTTP://LOCALHOST:{port}/",
    "http://127.0.0.2:{port}#@allowed.example/", "http://[::ffff:127.0.0.2]:{port}/", "http://0.0.0.0:{port}/",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("url", INWARD)
def test_no_field_reaches_inward(site: Site, kind: str, url: str) -> None:
    with listening(response(FILES[kind]), host="127.0.0.2") as canary:
        error = site.refusal(part(kind, url.format(port=canary.port)))
        # For the second server localhost is at an address that it may ask.
        assert error["code"] in ("media_refused", "media_unreachable")
        time.sleep(0.005)
        assert canary.num_connections == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("location", ["http://127.0.0.2:{port}/", "http://localhost:{port}/", "file:///etc/hostname"])
def test_an_allowed_host_leads_nobody_inward(opened: Site, kind: str, location: str) -> None:
    with listening(response(FILES[kind]), host="127.0.0.2") as canary:
        with listening(response(status="302 Found", Location=location.format(port=canary.port))) as host:
            opened.refusal(part(kind, f"http://127.0.0.1:{host.port}/"))
            assert host.num_connections == 1
        time.sleep(0.005)
        assert canary.num_connections == 0


def test_a_playlist_opens_nothing(opened: Site) -> None:
    with listening(response(CLIP)) as canary:
        target = f"http://127.0.0.1:{canary.port}/x.ts"
        for text in (f"#EXTM3U\n#EXTINF:10,\n{target}\n#EXT-X-ENDLIST\n", f"ffconcat version 1.0\nfile '{target}'\n"):
            for kind in KINDS:
                opened.refusal(part(kind, text.encode()))
        assert canary.num_connections == 0


# ---- 22: local files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_field_reads_other_files(site: Site, kind: str) -> None:
    here, secret = site.folder, f"secret-{kind}"
    names = [
        "file:///etc/hostname", "/etc/hostname", "./x.png", f"../{secret}", f"{here}/../{secret}", f"{here}/out-{kind}",
        f"file://{here}/%2e%2e/{secret}", f"file://{here}/..%2f{secret}", str(here.parent / secret), "/dev/zero",
        f"{os.path.relpath(here.parent)}/{secret}", "~/.ssh/id_rsa", "/proc/self/environ",
    ]  # fmt: skip
    messages = {site.refusal(part(kind, name))["message"] for name in [*names, "/no/such/file"]}
    assert len(messages) == 1 and "--allowed-local-media-path" in messages.pop()


# ---- time -----------------------------------------------------------------------------------------------------------


def test_slow_hosts_hold_up_nobody_else(opened: Site) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent, ThreadPoolExecutor(12) as pool:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        waiting = [pool.submit(opened.ask, part("image", url), timeout_s=2) for _ in range(7)]
        time.sleep(0.2)
        started = time.monotonic()
        assert opened.facts({"type": "text", "text": "hi"}) and time.monotonic() - started < 1
        assert {one.result().status_code for one in waiting} <= {400, 504}


# ---- mstar run ------------------------------------------------------------------------------------------------------


def test_run_takes_media_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    flags = ["--image", str(folder / "image"), "--audio", f"file://{folder}/audio", "--video", str(folder / "video")]
    flags += ["--num-frames", "4", "--text", "hi", "--task", "media", "--log-level", "error", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        main(["run", "--plugin", "echo", *flags])
    assert ended.value.code == 0
    (output,) = json.loads((tmp_path / "result.json").read_text())["outputs"]
    assert output["shape"] == [4 + 6 + 4 + 2]


@pytest.mark.parametrize("kind", KINDS)
def test_run_fetches_from_public_hosts_alone(
    folder: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--plugin", "echo", "--task", "media", "--log-level", "error", "--out", str(tmp_path / "out")]
    with listening(response(FILES[kind])) as canary:
        url = f"http://127.0.0.1:{canary.port}/"
        (tmp_path / "request.json").write_text(json.dumps({"inputs": [part(kind, url)]}))
        for given in ([f"--{kind}", url], ["--request", str(tmp_path / "request.json")]):
            with pytest.raises(SystemExit) as ended:
                main(["run", *flags, *given])
            assert ended.value.code == 2 and "not found at a public address" in capsys.readouterr().err
        assert canary.num_connections == 0
        with pytest.raises(SystemExit) as ended:
            main(["run", *flags, f"--{kind}", url, "--allowed-media-domains", "127.0.0.1"])
        assert ended.value.code == 0 and canary.num_connections == 1
