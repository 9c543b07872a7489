"""Media for tests: clips of any codec, files that claim more than they are, and a listener that nobody should reach."""

from __future__ import annotations

import base64
import io
import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import av
import numpy as np
from PIL import Image

# ---- images ---------------------------------------------------------------------------------------------------------


def data_uri(data: bytes, kind: str = "application/octet-stream") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def gradient(height: int = 20, width: int = 30) -> np.ndarray:
    """uint8 (H, W, 3), every pixel another."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 8, y * 12, x + y], axis=-1).astype(np.uint8)


def image_file(pixels: np.ndarray | None = None, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(gradient() if pixels is None else pixels).save(file, kind, **options)
    return file.getvalue()


def png_of_one_colour(width: int, height: int) -> bytes:
    """A grey PNG, made without its pixels ever being in memory."""
    packer = zlib.compressobj(9)
    row = b"\0" * (1 + width)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", packed), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def png_with_bad_checksum() -> bytes:
    """Its pixels are right, and what should prove that is not."""
    data = bytearray(image_file())
    start = data.index(b"IDAT")
    data[start + 4 + int.from_bytes(data[start - 4 : start])] ^= 1
    return bytes(data)


def animation(kind: str, num_frames: int) -> bytes:
    file = io.BytesIO()
    frames = [Image.new("L", (8, 8), i % 256) for i in range(num_frames)]
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], duration=10)
    return file.getvalue()


def tiff_bomb(width: int, height: int) -> bytes:
    """A TIFF in one Deflate strip of zeros, a thousandth of what it claims to hold."""
    strip = zlib.compress(b"\0" * 10_000_000, 9)
    tags = [
        (256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 8), (262, 3, 1), (273, 4, 8), (277, 3, 1),
        (278, 4, height), (279, 4, len(strip)),
    ]  # fmt: skip
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(strip)) + strip + struct.pack("<H", len(tags)) + entries + b"\0" * 4


# ---- videos ---------------------------------------------------------------------------------------------------------


def clip(
    codec: str = "libx264", kind: str = "mp4", *, num_frames: int = 60, size: tuple[int, int] = (64, 48),
    rate: int = 10, group: int = 12, rotation: int = 0, pixels: str = "yuv420p", options: dict[str, str] | None = None,
) -> bytes:  # fmt: skip
    """A clip whose frame i is of grey 4 * i, with a white corner at the top left. `size` is (width, height)."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        stream.codec_context.gop_size = group
        if rotation:
            stream.set_display_rotation(rotation)
        for i in range(num_frames):
            frame = np.full((size[1], size[0], 3), 4 * i % 256, dtype=np.uint8)
            frame[:16, :16] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


# ---- hosts ----------------------------------------------------------------------------------------------------------


class Listener:
    """Answers every connection with the same bytes, and counts them."""

    def __init__(self, answer: bytes, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self.num_connections = 0
        self.requests: list[bytes] = []
        self._answer = answer
        self._tls = tls
        self._socket = socket.create_server((host, 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.num_connections += 1
            with connection:
                try:
                    connection = self._tls.wrap_socket(connection, server_side=True) if self._tls else connection
                    self.requests.append(connection.recv(65536))
                    connection.sendall(self._answer)
                    connection.close()  # the wrapped one
                except OSError:
                    continue

    def close(self) -> None:
        # A blocked accept outlives a close.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@contextmanager
def listening(answer: bytes = b"", *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> Iterator[Listener]:
    listener = Listener(answer, host=host, tls=tls)
    try:
        yield listener
    finally:
        listener.close()


def response(body: bytes = b"", *, status: str = "200 OK", **headers: str) -> bytes:
    """An HTTP answer; `Content_Length` becomes `Content-Length`, and is right unless given."""
    fields = {"Content-Length": str(len(body)), "Connection": "close"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body
