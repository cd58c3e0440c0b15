"""Rows with a rule that makes a conversation of each: a lazy list of examples, and a source of records, in one.

`source[i]` is `{"conversation": ...}` with images decoded, for training in memory. `source.read(i)` is the `Record`,
whose media items hold the stored bytes, for shards. Nothing is read before it is asked for.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.conversation import MEDIA_TYPES, Conversation, Item
from vlm_stream.errors import BadSampleError
from vlm_stream.sources.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import numpy.typing as npt

    from vlm_stream.sources.hf_rows import Rows

__all__ = ["HFSource", "MixedSource", "media_item", "text_item", "turn"]

_RECORD_KEYS: Final = ("mm_inputs_meta", "_text_tokens", "_mismatches")


class HFSource(Sequence[dict[str, Any]]):
    """Examples by number. Picklable as long as its rows are; the rules are functions of a module."""

    def __init__(
        self,
        rows: Rows,
        *,
        name: str,
        convert: Callable[[Mapping[str, Any], int], dict[str, Any]],
        finish: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    ) -> None:
        """Read `rows` through `convert`.

        Args:
            rows: The rows, media undecoded.
            name: What ledgers and shards call this source.
            convert: Row and number -> `{"conversation": ..., extras}`; raises `BadSampleError` or `ValueError`.
            finish: What `source[i]` does to that; decoding the images if None.
        """
        self.rows = rows
        self.name = name
        self._convert = convert
        self._finish = finish or decode_images

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        """Return one example, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = int(index) + (len(self) if index < 0 else 0)
        example = self._example(number)
        try:
            return self._finish(example)
        except (OSError, ValueError) as error:
            raise self._bad(number, "unreadable_media", f"a medium cannot be decoded ({error})") from error

    def read(self, index: int) -> Record:
        """Return one record, its media as stored; raise `BadSampleError` when the row does not map."""
        example = self._example(index)
        return Record(
            source=self.name,
            id=str(index),
            origin=f"{self.name}:{index}",
            conversation=_as_stored(example["conversation"]),
            extras={key: example[key] for key in _RECORD_KEYS if key in example},
        )

    def _example(self, number: int) -> dict[str, Any]:
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of source '{self.name}', which has {len(self)}")
        try:
            return self._convert(self.rows[number], number)
        except BadSampleError as error:
            raise self._bad(number, error.reason, str(error)) from None
        except KeyError as error:
            raise self._bad(number, "bad_row", f"the row has no column {error}") from None
        except ValueError as error:
            raise self._bad(number, "bad_row", str(error)) from None

    def _bad(self, number: int, reason: str, fact: str) -> BadSampleError:
        tail = "" if fact.endswith(".") else ". The sample is left out; mend the row or leave it out."
        return BadSampleError("convert", reason, f"{self.name}:{number}: {fact}{tail}")


class MixedSource(Sequence[dict[str, Any]]):
    """Several such sources as one, in a given order."""

    def __init__(self, sources: Sequence[HFSource], order: npt.NDArray[np.int64], *, name: str) -> None:
        """Show the sources in that order ([n, 2] source and row); rows may occur more than once."""
        self.name = name
        self.sources = tuple(sources)
        self.order = order

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.order)

    def __getitem__(self, index: Any) -> Any:
        """Return one example, or a list of them for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        source, row = map(int, self.order[index])
        return self.sources[source][row]

    def read(self, index: int) -> Record:
        """Return one record under its own source's name."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of source '{self.name}', which has {len(self)}")
        source, row = map(int, self.order[index])
        return self.sources[source].read(row)


def turn(role: str, *items: Item) -> dict[str, Any]:
    """Return one message."""
    return {"role": role, "content": list(items)}


def text_item(text: object) -> Item:
    """Return a text item; a null is no text."""
    if not isinstance(text, str):
        raise BadSampleError("convert", "content_not_text", f"a text column holds {text!r}, not text")
    return {"type": "text", "text": text}


def media_item(medium: str, value: Any) -> Item:
    """Return a media item for what a column holds: `{"bytes", "path"}`, bytes, a path or a decoded object."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if value is None or value in ("", b""):
        raise BadSampleError("convert", "null_media", f"the {medium} column is empty")
    return {"type": medium, medium: value}


def decode_images(example: dict[str, Any]) -> dict[str, Any]:
    """Return the example with PIL images in the places of bytes and paths."""
    from PIL import Image

    opened: dict[int, Any] = {}  # the same bytes twice are the same image

    def decode(item: Item) -> Item:
        where = item.get("image") if item.get("type") == "image" else None
        if not isinstance(where, (bytes, str)):
            return item
        if id(where) not in opened:
            image = Image.open(io.BytesIO(where) if isinstance(where, bytes) else where)
            image.load()
            opened[id(where)] = image
        return {**item, "image": opened[id(where)]}

    conversation = [
        {**message, "content": [decode(item) for item in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in example["conversation"]
    ]
    return {**example, "conversation": conversation}


def _as_stored(conversation: Conversation) -> Conversation:
    """Return the conversation with decoded images written as PNG: such rows never had bytes to copy."""
    return [{**message, "content": [_stored_item(item) for item in message["content"]]} for message in conversation]


def _stored_item(item: Item) -> Item:
    medium = item["type"]
    if medium not in MEDIA_TYPES or isinstance(item[medium], (bytes, str, list)) or not hasattr(item[medium], "save"):
        return item
    out = io.BytesIO()
    item[medium].save(out, format="PNG")
    return {**item, medium: out.getvalue()}
