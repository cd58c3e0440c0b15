"""The one sample form: a conversation, whose media items name where their bytes are.

    [{"role": "user",      "content": [{"type": "image", "image": "0.jpg"}, {"type": "text", "text": "What is it?"}]},
     {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]}]

Between rooms a conversation is plain JSON data. A media item is `{"type": medium, medium: where, **extras}`: `where` is
a path or URL in a source, a member name in a shard, and a decoded object once the medium is loaded; a video may also be
a list of frames. Extras such as `frame_indices`, `fps`, `start` and `end` travel along. This file knows the form and
nothing else: it refuses what does not have it, so that whoever reads a conversation need not ask.
"""

import math
import operator
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any, Final, NamedTuple, TypeAlias

from vlm_stream.errors import BadSampleError, say_error

Item: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]
Conversation: TypeAlias = list[Message]

MEDIA_TYPES: Final = ("image", "video", "audio")
SPAN_KEYS: Final = ("start", "end")
_MAX_FRAME: Final = 2**31  # frame numbers of containers and indexes have 32 bits


class Seconds(NamedTuple):
    """A part of a video or a sound."""

    start: float
    end: float | None
    """Not in it; None: up to the end of the file."""


def iter_media(conversation: Conversation) -> Iterator[Item]:
    """Yield the media items in the order in which the conversation shows them."""
    for message in conversation:
        content = message["content"]
        if isinstance(content, list):
            for item in content:
                if item.get("type") in MEDIA_TYPES:
                    yield item


def map_media(conversation: Conversation, change: Callable[[Item], Item]) -> Conversation:
    """Return a copy whose media items are what `change` makes of them, called in the order of `iter_media`."""

    def changed(item: Any) -> Any:
        return change(item) if isinstance(item, dict) and item.get("type") in MEDIA_TYPES else item

    return [
        {**message, "content": [changed(item) for item in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in conversation
    ]


def given_tokens(count: Any) -> int | None:
    """Return a token count that a sample brings along (`_text_tokens`, `_media_tokens`); None where it is none.

    >>> given_tokens(7.0), given_tokens("7"), given_tokens(-1), given_tokens(True)
    (7, None, None, None)
    """
    is_number = isinstance(count, (int, float)) and not isinstance(count, bool)
    return int(count) if is_number and 0 <= count < math.inf else None


def check_conversation(conversation: Any) -> None:
    """Raise `BadSampleError` at the first place that is not of the form, with its turn."""
    if not isinstance(conversation, list):
        raise _bad("no_messages", f"the conversation is {_kind(conversation)}, not a list of turns.")
    for number, message in enumerate(conversation, 1):
        if not isinstance(message, dict):
            raise _bad("turn_not_an_object", f"turn {number} is {_kind(message)}, not an object.")
        if not isinstance(message.get("role", ""), str):
            raise _bad("bad_role", f"turn {number} has {_kind(message['role'])} for a role, not text.")
        content = message.get("content")
        if isinstance(content, str):
            _check_text(content, number)
        elif isinstance(content, list):
            _check_items(content, number)
        else:
            raise _bad("content_not_text", f"turn {number} has {_kind(content)} for content, not text or a list.")


def _check_items(items: list[Any], number: int) -> None:
    for item in items:
        if not isinstance(item, dict):
            raise _bad("item_not_an_object", f"turn {number} has {_kind(item)} among its content, not an object.")
        if item.get("type") == "text":
            text = item.get("text")
            if not isinstance(text, str):
                raise _bad("content_not_text", f"turn {number} has a text item that holds {_kind(text)}, not text.")
            _check_text(text, number)


def _check_text(text: str, number: int) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            detail = f"turn {number} has half of a surrogate pair, which no tokenizer takes ({say_error(error)})."
            raise _bad("lone_surrogate", detail) from None


def frame_rate(item: Item) -> float | None:
    """Return the frames per second that a list of frames brings along; None where it does not say."""
    fps = item.get("fps")
    if fps is None or (fps == 0 and not isinstance(fps, bool)):
        return None
    try:
        rate = math.nan if isinstance(fps, (str, bool)) else float(fps)
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    if not 0 < rate < math.inf:
        shown = repr(fps)[:40] if isinstance(fps, (str, int, float)) else _kind(fps)
        raise _bad("bad_fps", f"the fps of a list of frames is {shown}, not a rate; write a positive number.")
    return rate


def named_frames(item: Item) -> list[int] | None:
    """Return the frames that a video item names itself; None where it names none."""
    indices = item.get("frame_indices")
    if indices is None:
        return None
    is_list = isinstance(indices, (list, tuple)) or hasattr(indices, "shape")
    numbers = [_frame_number(index) for index in indices] if is_list else []
    if not numbers or None in numbers:
        shown = str(list(indices)[:8])[:80] if is_list else _kind(indices)
        raise _bad("frame_index", f"frame_indices are {shown}, not frame numbers.")
    return [number for number in numbers if number is not None]


def named_span(item: Item) -> Seconds | None:
    """Return the seconds of its file that a video or audio item shows; None: all of them.

    The item is then a clip of its own: its frames, its times and its `frame_indices` count from the first frame in it.
    """
    start, end = (item.get(key) for key in SPAN_KEYS)
    if start is None and end is None:
        return None
    begin, stop = 0.0 if start is None else _seconds(start), None if end is None else _seconds(end)
    if not 0 <= begin < math.inf or not (stop is None or begin < stop < math.inf):
        shown = " and ".join(repr(each)[:40] for each in (start, end))
        raise _bad("bad_span", f"start and end are {shown}, no part of a clip; write seconds, 0 <= start < end.")
    if not isinstance(item.get(item["type"]), (str, bytes, bytearray, memoryview, PurePath)):
        detail = "start and end are seconds of a file, and the item holds frames or samples; leave out those not shown."
        raise _bad("bad_span", detail)
    return Seconds(begin, stop)


def without_span(item: Item) -> Item:
    """Return an item whose medium was cut already."""
    return {key: value for key, value in item.items() if key not in SPAN_KEYS}


def _seconds(value: Any) -> float:
    """Return a number; NaN for anything else."""
    try:
        return math.nan if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _frame_number(index: Any) -> int | None:
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        return None
    number = operator.index(index)
    return number if -_MAX_FRAME < number < _MAX_FRAME else None


def _kind(value: object) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def _bad(reason: str, detail: str) -> BadSampleError:
    return BadSampleError("convert", reason, detail)
