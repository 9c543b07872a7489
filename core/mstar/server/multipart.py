"""A multipart form as the JSON object it stands for: files as data URIs, numbers and lists as JSON writes them.

The body has been read, within its limit. Knows bytes and names of fields, not what they mean.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Collection
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from mstar.errors import RequestError
from mstar.server.native import MAX_PARTS, parse_json

FORM = "multipart/form-data"
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what a client gets wrong is told to the client


def parse_form(
    body: bytes, *, content_type: str, files: Collection[str], texts: Collection[str], lists: Collection[str]
) -> dict[str, Any]:
    """The fields of a form. Raises RequestError 400 for a body that is none, cut off, or gives a field twice.

    Args:
        files: fields that may be files.
        texts: fields that are taken as they are; others are numbers, words or lists, such as "7", "true", "[0.4, 1]".
        lists: fields that are lists even if they are given once. Any other is one if its name ends in "[]".
    """
    parts = _Parts()
    try:
        _, options = parse_options_header(content_type)
        parser = MultipartParser(options.get(b"boundary", b""), parts.callbacks)
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise RequestError(f"the body is not a valid multipart form: {str(error)[:200]}") from error
    if not parts.is_whole:
        raise RequestError("the multipart form has no end: its last boundary is missing; send the whole body")
    fields: dict[str, Any] = {}
    for name, data, is_file in parts.found:
        bare = name.removesuffix("[]")
        if is_file and bare not in files:
            raise RequestError(f"{bare!r} is a file; send it as a plain field", param=bare)
        value = _data_uri(data) if is_file else _value(data, name=bare, is_text=bare in texts)
        if bare in lists or name != bare:
            fields.setdefault(bare, []).append(value)
        elif bare in fields:
            raise RequestError(f"the field {bare!r} is given twice; leave one out", param=bare)
        else:
            fields[bare] = value
    return fields


def _data_uri(data: bytes) -> str:
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


def _value(data: bytes, *, name: str, is_text: bool) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name!r} is not UTF-8 at byte {error.start}", param=name) from error
    if is_text:
        return text
    try:
        return parse_json(data)
    except RequestError:
        return text  # a word


class _Parts:
    """What the parser calls: collects (name, content, whether it is a file)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, bytes, bool]] = []
        self.is_whole = False
        self._header = [bytearray(), bytearray()]
        self._disposition = b""
        self._data = bytearray()
        self.callbacks: Any = {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": lambda data, start, end: self._data.extend(data[start:end]),
            "on_part_end": self._end,
            "on_end": lambda: setattr(self, "is_whole", True),
        }

    def _begin(self) -> None:
        if len(self.found) == MAX_PARTS:
            raise RequestError(f"the multipart form has more than {MAX_PARTS} parts; send fewer")
        self._disposition, self._data = b"", bytearray()

    def _end_header(self) -> None:
        if self._header[0].lower() == b"content-disposition":
            self._disposition = bytes(self._header[1])
        elif self._header[0].lower() == b"content-transfer-encoding" and self._header[1].lower() == b"base64":
            raise RequestError("a part of the multipart form is in base64; send files as they are")
        self._header = [bytearray(), bytearray()]

    def _end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if not 0 < len(name) <= 100:
            raise RequestError("a part of the multipart form has no name, or one over 100 characters")
        self.found.append((name, bytes(self._data), b"filename" in options))
