"""What a piece of content is, in a few bytes: keys of caches."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import numpy as np


def content_key(*content: Any) -> bytes:
    """32 bytes that tell arrays (dtype, shape and elements), texts, bytes, numbers and None, nested or not, apart.

    Name all that a result depends on: the content, its geometry, and how it was decoded.
    """
    state = blake2b(digest_size=32)
    _add(state, content)
    return state.digest()


def _add(state: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, list | tuple):
        state.update(f"({len(value)})".encode())
        for item in value:
            _add(state, item)
    elif isinstance(value, str | bytes | int | float | None):
        text = repr(value).encode()
        state.update(b"%d:" % len(text) + text)
    else:
        array = np.ascontiguousarray(value)
        state.update(f"<{array.dtype.str}{array.shape}>".encode())
        state.update(array.reshape(-1).view(np.uint8))
