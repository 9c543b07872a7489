"""JSON values as wire types: each field checked, and what is wrong with one told by its name, value and limits.

Knows msgspec's errors and types, no wire type of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from mstar.config import close_and_known
from mstar.errors import RequestError

_Wire = TypeVar("_Wire")
_SURROGATE = re.compile("[\ud800-\udfff]")


def convert(value: Any, kind: type[_Wire], *, prefix: str = "", more: Iterable[str] = ()) -> _Wire:
    """`value` (built-in types) as a wire type. Raises RequestError that names the field, its value and its limits.

    Args:
        prefix: what comes before the field in `param`, such as "params.".
        more: names the client may also use, to be listed beside the type's own.
    """
    try:
        check_values(value, prefix=prefix)
        return msgspec.convert(value, kind)
    except RecursionError as error:
        raise RequestError("the request is nested too deeply; no field needs more than a few levels") from error
    except msgspec.ValidationError as error:
        raise _explained(error, value=value, kind=kind, prefix=prefix, more=more) from error


def _explained(
    error: msgspec.ValidationError, *, value: Any, kind: type[Any], prefix: str, more: Iterable[str]
) -> RequestError:
    text, _, where = str(error).replace(" - at `key` in `$", " as a key - at `$").partition(" - at `$")
    path = [step for step in re.split(r"[.\[\]`]+", where) if step]
    at = value
    for step in path:
        at = at[int(step)] if isinstance(at, list) else at.get(step) if isinstance(at, dict) else None
    if found := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", text):
        name = prefix + ".".join([*path, found[2]])
        if found[1] == "missing required":
            return RequestError(f"{name!r} is missing", param=name)
        kinds = [part for part in _types_at(kind, path) if hasattr(part, "__struct_config__")]
        kinds = [part for part in kinds if part.__struct_config__.tag in (None, at.get("type"))]
        known = [field for part in kinds for field in field_names(part)] + ([] if path else [*more])
        return unknown_field(found[2], known, name=name)
    if text.startswith("Invalid value") and path[-1:] == ["type"]:
        text = f"must be one of {', '.join(_tags(kind, path[:-1]))}"
    elif text.startswith("Invalid enum value"):
        text = f"must be {_choices(kind, path)}"
    name = prefix + ".".join(path)
    shown = f" is {short(at)}" if path and isinstance(at, int | float | str | None) else ""
    text = re.sub(r"Expected (.*)", r"must be \1", text).replace("`", "")
    return RequestError(f"{name or 'the request'}{shown}: {text}", param=name or None)


def unknown_field(field: str, known: Sequence[str], *, name: str) -> RequestError:
    """The refusal of a field beside which these are known. `name` is the longer one that errors give."""
    told = ", ".join(known)
    is_nested = field in ("extra_body", "mm_processor_kwargs", "sampling_params_list")  # as other servers have them
    here = f": what it holds stands beside the other fields here; known: {told}"
    hint = here if is_nested else close_and_known(field, known)
    return RequestError(f"{short(name)} is unknown{hint}", param=name[:60] or None, code="unknown_parameter")


def _choices(kind: type[Any], path: list[str]) -> str:
    """What a Literal accepts that stands in a wire type."""
    values = [value for part in _types_at(kind, path) if get_origin(part) is Literal for value in get_args(part)]
    return repr(values[0]) if len(values) == 1 else f"one of {', '.join(map(str, values))}"


def _tags(kind: type[Any], path: list[str]) -> list[str]:
    """The values of `type` of the parts that stand there in a wire type."""
    return [part.__struct_config__.tag for part in _types_at(kind, path) if hasattr(part, "__struct_config__")]


def _types_at(kind: Any, path: list[str]) -> list[Any]:
    """The types of which a value is one, by its place in a wire type; unions and annotations taken apart."""
    if get_origin(kind) in (Annotated, Union, UnionType):
        kinds = get_args(kind)[:1] if get_origin(kind) is Annotated else get_args(kind)
        return [found for one in kinds for found in _types_at(one, path)]
    if not path:
        return [kind]
    if get_origin(kind) is list:
        return _types_at(get_args(kind)[0], path[1:])
    fields = msgspec.structs.fields(kind) if hasattr(kind, "__struct_config__") else ()
    return [found for field in fields if field.encode_name == path[0] for found in _types_at(field.type, path[1:])]


def short(value: Any) -> str:
    """A value as errors show it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def check_values(value: Any, *, prefix: str = "") -> None:
    """Refuse, before they reach a tensor or tokeniser, NaN, infinity, integers over 64 bits and lone surrogates."""
    if isinstance(value, dict | list):
        # Keys are checked too, by their place.
        for key, item in [*enumerate(value), *(value.items() if isinstance(value, dict) else ())]:
            check_values(item, prefix=f"{prefix}{str(key)[:60]}.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{prefix[:-1]} is {value}; it must be finite", param=prefix[:-1])
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise RequestError(f"{prefix[:-1]} is {short(value)}; it must fit 64 bits", param=prefix[:-1])
    elif isinstance(value, str) and not value.isascii() and _SURROGATE.search(value):
        raise RequestError(f"{prefix[:-1]} is {short(value)}; it must be valid Unicode", param=prefix[:-1])


def field_names(kind: type[Any]) -> list[str]:
    """Names of a wire type's fields, in order."""
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def check_known(
    value: str, known: Iterable[str], problem: str, *, param: str, status: int = 400, code: str | None = None
) -> None:
    """Raises RequestError if `value` is not known: `problem`, followed by what is."""
    if value not in known:
        raise RequestError(f"{problem} {', '.join(known) or 'none'}", param=param, status=status, code=code)
