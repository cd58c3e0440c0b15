"""Bytes -> one JSON value, strictly: UTF-8, no NaN, nothing that could not be written back as UTF-8 JSON."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["NotJsonError", "parse_json"]

# Half of a surrogate pair is legal JSON text and illegal UTF-8. Any escape of that range makes a second look worth it.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class NotJsonError(ValueError):
    """The bytes are not a JSON value that can be kept."""

    def __init__(self, reason: str, fact: str) -> None:
        """Keep the countable reason and the fact."""
        super().__init__(fact)
        self.reason = reason


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_json(data: bytes) -> Any:
    """Return the value; raise `NotJsonError`."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = data[error.start]
        raise NotJsonError("not_utf8", f"byte 0x{bad:02x} at column {error.start + 1} is not UTF-8") from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise NotJsonError("broken_json", f"broken JSON at character {error.pos + 1} ({error.msg})") from None
    except RecursionError:
        raise NotJsonError("broken_json", "broken JSON (nested too deeply)") from None
    except ValueError as error:  # NaN, Infinity, an integer of thousands of digits
        raise NotJsonError("broken_json", f"broken JSON ({error})") from None
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            fact = "a string has half of a surrogate pair, which UTF-8 cannot hold"
            raise NotJsonError("lone_surrogate", fact) from None
    return value
