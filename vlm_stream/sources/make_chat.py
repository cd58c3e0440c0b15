"""Datasets of dialogues about one image, in the from/value form: UniMM-Chat and those in the manner of LLaVA."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.errors import BadSampleError
from vlm_stream.sources.hf_rows import load_rows
from vlm_stream.sources.hf_source import HFSource, media_item, text_item, turn
from vlm_stream.sources.mismatch import MISMATCHES_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vlm_stream.conversation import Item

__all__ = ["make_llava_onevision_dataset", "make_unimm_chat_dataset"]

_ROLES: Final = {"human": "user", "gpt": "assistant"}
_UNSEEN: Final = "surplus_media: the row has an image, but no turn shows <image>"
_IMAGE = re.compile(r"<image\s*>", re.IGNORECASE)


def make_unimm_chat_dataset(
    path_or_dataset: Any = "Yirany/UniMM-Chat",
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return dialogues about an image (columns `image`, `conversation`: JSON of from/value turns)."""
    columns = ("image", "conversation")
    rows = load_rows(path_or_dataset, split, columns, limit=limit_dataset_samples, ignored=tuple(kwargs))
    return HFSource(rows, name="unimm_chat", convert=_unimm)


def make_llava_onevision_dataset(
    path_or_dataset: Any = "liuhaotian/LLaVA-Instruct-150K",
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return dialogues about an image, or without one (columns `conversations`, `image`).

    `source[i]` also has the image itself under `image`, None where there is none.
    """
    columns = ("conversations", "image")
    rows = load_rows(path_or_dataset, split, columns, limit=limit_dataset_samples, ignored=tuple(kwargs))
    return HFSource(rows, name="llava_onevision", convert=_llava, finish=_with_image)


def _unimm(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    image = media_item("image", row["image"])
    conversation, notes, shown = [], [], False
    for number, role, text in _turns(row["conversation"]):
        if role == "user":
            items = _around_images(text, image) or [image]
            shown = shown or any(item["type"] == "image" for item in items)
            conversation.append(turn("user", *items))
        elif role == "assistant":
            conversation.append(turn("assistant", text_item(text.strip())))
        else:
            notes.append(_skipped(number, role))
    return _example(conversation, notes if shown else [*notes, _UNSEEN])


def _around_images(text: str, image: Item) -> list[Item]:
    """Return the stripped pieces of a text with the one image at every placeholder between them."""
    items: list[Item] = []
    for number, piece in enumerate(_IMAGE.split(text)):
        if number:
            items.append(dict(image))
        if stripped := piece.strip():
            items.append(text_item(stripped))
    return items


def _llava(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    conversation, notes, shown = [], [], False
    for number, role, text in _turns(row["conversations"]):
        if role not in ("user", "assistant"):
            notes.append(_skipped(number, role))
            continue
        items = [text_item(_IMAGE.sub("", text).strip())] if role == "user" else [text_item(text)]
        if role == "user" and _IMAGE.search(text):
            items.insert(0, media_item("image", row["image"]))
            shown = True
        conversation.append(turn(role, *items))
    if row["image"] is not None and not shown:
        notes.append(_UNSEEN)
    return _example(conversation, notes)


def _with_image(example: dict[str, Any]) -> dict[str, Any]:
    from vlm_stream.conversation import iter_media
    from vlm_stream.sources.hf_source import decode_images

    decoded = decode_images(example)
    first = next(iter_media(decoded["conversation"]), None)
    return {**decoded, "image": None if first is None else first["image"]}


def _turns(value: Any) -> Iterator[tuple[int, str, str]]:
    """Yield number, role (as written where it has no name here) and text of from/value turns, parsed if need be."""
    turns = json.loads(value) if isinstance(value, str) else value
    if not isinstance(turns, list) or not turns:
        raise BadSampleError("convert", "messages_not_a_list", "the conversation is not a list of turns, or is empty")
    for number, message in enumerate(turns, 1):
        if not isinstance(message, dict) or not isinstance(message.get("value"), str):
            raise BadSampleError("convert", "null_content", f"turn {number} has no text under 'value'")
        role = message.get("from")
        yield number, _ROLES.get(str(role), str(role)), message["value"]


def _skipped(number: int, role: str) -> str:
    return f"unmapped_role: turn {number} has the role '{role}'; mapped are {', '.join(sorted(_ROLES))}"


def _example(conversation: list[dict[str, Any]], notes: list[str]) -> dict[str, Any]:
    if not conversation:
        raise BadSampleError("convert", "empty_conversation", "no turn maps: " + "; ".join(notes))
    return {"conversation": conversation, **({MISMATCHES_KEY: notes} if notes else {})}
