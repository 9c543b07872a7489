"""Fields of JSON files, each checked as it is read. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mstar.errors import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, found a {type(content).__name__}")
    return content


class Fields:
    """The fields of one object of a JSON file; null is as good as absent."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self.prefix = prefix

    def refuse(self, name: str, problem: str, remedy: str = "correct it") -> ConfigError:
        return ConfigError(f"{self.path}: {self.prefix}{name} is {self.values.get(name)!r}; {problem}: {remedy}")

    def value(self, name: str, default: Any = None) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self.path} lacks {self.prefix}{name}; add it as the model was trained with")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.value(name, default)
        if not isinstance(value, str):
            raise self.refuse(name, "expected a string")
        return value

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(name, f"expected a whole number of at least {least}")
        return value

    def number(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
            raise self.refuse(name, f"expected a number above {above:g}")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.value(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "expected true or false")
        return value

    def wholes(
        self, name: str, default: tuple[int, ...] | None = None, *, count: int | None = None, least: int = 0
    ) -> tuple[int, ...]:
        value = self.value(name, default)
        wanted = f"{count} whole numbers" if count else "a list of whole numbers"
        if not isinstance(value, list | tuple) or (count and len(value) != count):
            raise self.refuse(name, f"expected {wanted}")
        if any(isinstance(one, bool) or not isinstance(one, int) or one < least for one in value):
            raise self.refuse(name, f"expected {wanted} of at least {least}")
        return tuple(value)

    def part(self, name: str, default: Mapping[str, Any] | None = None) -> Fields:
        value = self.value(name, default)
        if not isinstance(value, Mapping):
            raise self.refuse(name, "expected an object")
        return Fields(value, self.path, f"{self.prefix}{name}.")

    def require(self, name: str, only: Any, why: str) -> None:
        """Refuse any value but `only`, which also stands for a field left out."""
        if self.values.get(name) not in (None, only):
            raise self.refuse(name, f"{why}, so only {json.dumps(only)} can be served", "use another checkpoint")
