"""How options are declared and checked: one mechanism for all of them.

Enters: dataclasses whose fields were declared by `option`. Types and choices are checked by pydantic on the declared
types, ranges by the bounds in the declarations. Every refusal is a sentence with the allowed values.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from functools import cache
from typing import Any, Final, NoReturn, get_args, get_type_hints

from vlm_stream.errors import ConfigError, nearest_name

_UNITS: Final = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("KMGT", 1)},
    **{f"{unit}I": 1024**power for power, unit in enumerate("KMGT", 1)},
}


def option(default: Any, text: str, *, least: float | None = None, flag: bool = False, in_bytes: bool = False) -> Any:
    """Declare an option: default, help, the least value, whether commands have a flag for it, whether 2GiB is one."""
    return field(default=default, metadata={"help": text, "least": least, "flag": flag, "in_bytes": in_bytes})


def parse_size(text: str) -> int:
    """Read a number of bytes as people write it.

    >>> parse_size("500M"), parse_size("2GiB"), parse_size("4096")
    (500000000, 2147483648, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([KMGT]I?|)B?", text.strip().upper())
    if match is None:
        raise ConfigError(f"'{text}' is not a size; write 500M, 2GiB or a number of bytes")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


def human_bytes(num_bytes: float) -> str:
    """Return a size as people read it.

    >>> human_bytes(1532928)
    '1.53 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} TB"


@cache
def _types(cls: type, kinds: tuple[type, ...]) -> dict[str, Any]:
    return get_type_hints(cls, localns={kind.__name__: kind for kind in kinds})


@cache
def _adapter(cls: type, name: str, kinds: tuple[type, ...]) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(_types(cls, kinds)[name])


def check_fields(options: Any, *kinds: type) -> None:
    """Bring every value of a frozen dataclass to its declared type; refuse what has another type, choice or range.

    `kinds` are types that annotations name and their module imports for type checkers alone.
    """
    for each in fields(options):
        value = getattr(options, each.name)
        if value is each.default:
            continue
        least = each.metadata["least"]
        if each.metadata["in_bytes"] and isinstance(value, str):
            value = _size_of(each.name, value)
        if isinstance(value, bool) and least is not None:
            _refuse_range(each.name, value, least)
        value = _convert(type(options), each.name, value, kinds)
        if least is not None and value is not None and not value >= least:
            _refuse_range(each.name, value, least)
        object.__setattr__(options, each.name, value)


def _size_of(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _convert(cls: type, name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    from pydantic import ValidationError

    hint = _types(cls, kinds)[name]
    _check_nested(hint, value, f"{name}.")
    try:
        return _adapter(cls, name, kinds).validate_python(value)
    except ValidationError as error:
        found = error.errors(include_url=False)
        if isinstance(value, Mapping):  # it stands for a dataclass, and not for one of the words beside that
            found.sort(key=lambda each: each["type"] == "literal_error")
        first = found[0]
        sentence = first["msg"].removeprefix("Value error, ")
        if first["type"] == "value_error":
            raise ConfigError(sentence) from None
        if first["type"] == "literal_error":
            raise ConfigError(f"{name} is {value!r}; {nearest_name(str(value), _choices(hint))}") from None
        nested = {getattr(kind, "__name__", "") for kind in filter(is_dataclass, get_args(hint))}
        place = ".".join([name, *(str(part) for part in first["loc"] if part not in nested)])
        raise ConfigError(
            f"{place} is {first['input']!r}, which it cannot be: {sentence[:1].lower()}{sentence[1:]}"
        ) from None


def _check_nested(hint: Any, value: Any, prefix: str) -> None:
    """Refuse unknown names in a mapping that stands for a dataclass: pydantic would ignore them."""
    for kind in filter(is_dataclass, (hint, *get_args(hint)) if isinstance(value, Mapping) else ()):
        check_names(kind, value, prefix=prefix)
        types = get_type_hints(kind)
        for name, inner in value.items():
            _check_nested(types[name], inner, f"{prefix}{name}.")


def _choices(hint: Any) -> list[str]:
    """Return the values of the Literal in a type."""
    values = [value for part in get_args(hint) for value in (get_args(part) or (part,)) if value is not type(None)]
    return [f"the fields of {value.__name__}" if isinstance(value, type) else str(value) for value in values]


def check_names(cls: Any, given: Mapping[str, Any], others: Sequence[str] = (), *, prefix: str = "") -> None:
    """Refuse names that are no fields; `others` are mentioned as allowed too."""
    known = [each.name for each in fields(cls)]
    for name in given:
        if name not in known:
            raise ConfigError(f"there is no option '{prefix}{name}'; {nearest_name(str(name), [*known, *others])}")


def _refuse_range(name: str, value: Any, least: float) -> NoReturn:
    if isinstance(least, int) and isinstance(value, int):
        raise ConfigError(f"{name} is {value!r}, but it counts something: give a whole number of at least {least}")
    raise ConfigError(f"{name} is {value!r}, but it must be at least {least:g}")
