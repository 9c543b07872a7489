"""A checkpoint's JSON files, each field checked as it is read; what is wrong is named with file, value and remedy.

Plugins' configurations are read with it. Knows no field, and imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mstar.errors import ConfigError

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "swish")
"""What checkpoints call activation functions; `mstar.layers.activation` has them."""


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """The object of a JSON file; {} for an `optional` one that is not there. Raises ConfigError."""
    if optional and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not valid JSON, or no file: {error}; download it again") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, found a {type(content).__name__}")
    return content


class Fields:
    """The fields of one object. A field that is null is one that is left out.

    What is not as its reader wants raises ConfigError; so does a field that is left out and has no default.

        fields = Fields(read_object(folder / "config.json"), folder / "config.json")
        heads = fields.part("text_config").whole("num_attention_heads", 16)
    """

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.values = values
        self.path = path
        self.prefix = prefix

    def refuse(self, name: str, problem: str, remedy: str = "correct it") -> ConfigError:
        return ConfigError(f"{self.path}: {self.prefix}{name} is {self.values.get(name)!r}; {problem}: {remedy}")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

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
            raise self.refuse(name, "expected a number" + (f" above {above:g}" if above > -math.inf else ""))
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        value = self.value(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "expected true or false")
        return value

    def wholes(
        self, name: str, default: tuple[int, ...] | None = None, *, least: int = 1, count: int | None = None
    ) -> tuple[int, ...]:
        value = self.value(name, default)
        is_list = isinstance(value, list | tuple) and count in (None, len(value))
        if not is_list or any(isinstance(one, bool) or not isinstance(one, int) or one < least for one in value):
            raise self.refuse(name, f"expected {count or 'a list of'} whole numbers of at least {least}")
        return tuple(value)

    def numbers(self, name: str, default: tuple[float, ...], *, count: int) -> tuple[float, ...]:
        value = self.value(name, default)
        is_list = isinstance(value, list | tuple) and len(value) == count
        if not is_list or any(isinstance(one, bool) or not isinstance(one, int | float) for one in value):
            raise self.refuse(name, f"expected {count} numbers")
        return tuple(map(float, value))

    def activation(self, name: str, default: str) -> str:
        if (value := self.text(name, default)) not in ACTIVATIONS:
            raise self.refuse(name, f"known: {', '.join(ACTIVATIONS)}", "use another checkpoint")
        return value

    def part(self, name: str, default: Mapping[str, Any] | None = None) -> Fields:
        value = self.value(name, default)
        if not isinstance(value, Mapping):
            raise self.refuse(name, "expected an object")
        return Fields(value, self.path, f"{self.prefix}{name}.")

    def require(self, name: str, only: Any, why: str) -> None:
        """Refuse any value but `only`, which also stands for a field left out."""
        if self.values.get(name) not in (None, only):
            raise self.refuse(name, f"{why}, so only {json.dumps(only)} can be served", "use another checkpoint")
