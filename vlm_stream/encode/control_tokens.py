"""Control tokens: which tokens stand for media, and typed text that looks like a control token stays text.

Enters: a processor; ids with their grids; a conversation. Leaves: ids and strings of media tokens, a check of their
number, a conversation whose typed control strings cannot become tokens.

A user may type `<|im_start|>assistant` or `<|image_pad|>`; a tokenizer would make control tokens of it, and with them a
turn that nobody took or an image that nobody sent. Before rendering, each such string is replaced by one private
character; after the processor has run, the tokens of that piece of text are replaced by the tokens of what was typed,
cut after its first character so that no control token can form. Other text keeps the processor's own ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from vlm_stream.conversation import MEDIA_TYPES, Conversation
from vlm_stream.errors import BadSampleError
from vlm_stream.tokens import Processor, tokenizer_of

if TYPE_CHECKING:
    import torch

    from vlm_stream.encode.chat_format import ChatFormat

_ID_ATTRIBUTES: Final = (
    "image_token_id",
    "video_token_id",
    "image_token_index",
    "video_token_index",
    "media_placeholder_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_token_id",
    "image_break_token_id",
    "image_end_token_id",
    "boi_token_index",
    "eoi_token_index",
    "boi_token_id",
    "eoi_token_id",
)
_VISION_STRINGS: Final = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|media_start|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<image>",
    "<video>",
    "<|image|>",
    "<|video|>",
    "[IMG]",
    "[IMG_END]",
    "[IMG_BREAK]",
)
_VISION_PARTS: Final = ("image", "video", "media", "vision", "img_pad", "vid_pad")
_PLACEHOLDER_PARTS: Final = (*_VISION_PARTS, "audio", "img", "sound", "so_embedding", "patch")
_TOKEN_ATTRIBUTES: Final = ("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "fake_image_token")
_GRIDS: Final = (("image", "image_grid_thw", "image_processor"), ("video", "video_grid_thw", "video_processor"))
_TIME_POOLED: Final = ("Kimi_K25Processor", "KimiK25Processor")
"""Processors in which all frames of one grid row share their tokens."""
_ROWS_END: Final = ("HunYuanVLProcessor",)
"""Processors that write one more image token after each row of an image, and one before and after all."""

_PRIVATE_BEGIN: Final = 0x10F000  # plane 16, private use: no font, no text and no vocabulary has it
_PRIVATE: Final = re.compile("[\U0010f000-\U0010ffff]")
_KEPT_KEYS: Final = frozenset({"role", "type", *MEDIA_TYPES})

_vision_ids: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()
_grid_tokens: WeakKeyDictionary[Any, dict[str, list[int]]] = WeakKeyDictionary()


def added_tokens(tokenizer: Any) -> dict[str, int]:
    """Return {text: id} of the tokens that are found in a text before it is cut into words."""
    decoder = getattr(tokenizer, "added_tokens_decoder", None)
    return {str(token): int(index) for index, token in decoder.items()} if isinstance(decoder, dict) else {}


def vision_token_ids(processor: Processor) -> frozenset[int]:
    """Return the ids of all tokens that stand for images or videos or frame them; empty when none is known."""
    known = _vision_ids.get(processor)
    if known is None:
        known = _vision_ids[processor] = _find_vision_ids(processor)
    return known


def _find_vision_ids(processor: Processor) -> frozenset[int]:
    tokenizer = getattr(processor, "tokenizer", None)
    owners = (processor, getattr(processor, "config", None))
    values = [getattr(owner, name, None) for owner in owners for name in _ID_ATTRIBUTES]
    values += [_token_id(tokenizer, token) for token in _VISION_STRINGS]
    values += [index for token, index in added_tokens(tokenizer).items() if _holds(token, _VISION_PARTS)]
    return frozenset(value for value in values if isinstance(value, int) and not isinstance(value, bool))


def media_token_strings(processor: Processor) -> set[str]:
    """Return the texts that a processor reads as media, or writes for them: what no user may type as tokens."""
    tokenizer = getattr(processor, "tokenizer", None)
    vision = vision_token_ids(processor)
    found = {t for t, index in added_tokens(tokenizer).items() if index in vision or _holds(t, _PLACEHOLDER_PARTS)}
    for owner in (processor, tokenizer):
        found |= {token for name in _TOKEN_ATTRIBUTES if isinstance(token := getattr(owner, name, None), str)}
    return found - {""}


def media_token_ids(processor: Processor) -> frozenset[int]:
    """Return the ids of every token that stands for an image, a video or audio, or frames one."""
    added = added_tokens(getattr(processor, "tokenizer", None))
    return vision_token_ids(processor) | {added[token] for token in media_token_strings(processor) if token in added}


def placeholder_ids(processor: Processor) -> frozenset[int]:
    """Return the ids that templates write, or processors repeat, in the place of media."""
    return frozenset(token_id for medium in MEDIA_TYPES for token_id in _list_placeholders(processor, medium))


def _list_placeholders(processor: Processor, medium: str) -> list[int]:
    """Return the ids of tokens that stand for a medium; the first is the one that is repeated for embeddings."""
    tokenizer = getattr(processor, "tokenizer", None)
    owners = (processor, getattr(processor, "config", None), tokenizer, getattr(tokenizer, "config", None))
    names = (f"{medium}_token_id", f"{medium}_token_index", f"{medium}_token")
    values: list[Any] = [getattr(owner, name, None) for owner in owners for name in names]
    values += [f"<|{medium}_pad|>", f"<{medium}>", f"<|{medium}|>"]
    found = [_token_id(tokenizer, value) if isinstance(value, str) else value for value in values]
    return [token_id for token_id in found if isinstance(token_id, int) and not isinstance(token_id, bool)]


def check_media_tokens(processor: Processor, input_ids: torch.Tensor, sample: Mapping[str, Any]) -> None:
    """Raise `BadSampleError` when ids [S] hold another number of media tokens than the grids ask for."""
    grids: dict[str, Any] = {medium: sample.get(key) for medium, key, _ in _GRIDS}
    if all(grid is None for grid in grids.values()):
        return
    known = _grid_tokens.get(processor)
    if known is None:
        known = {medium: _list_placeholders(processor, medium)[:1] for medium in grids}
        _grid_tokens[processor] = known
    if any(grid is not None and not known[medium] for medium, grid in grids.items()):
        return
    expected = sum(
        _count_grid(processor, medium, part, sample) for medium, _, part in _GRIDS if grids[medium] is not None
    )
    # Both tokens, whatever the grids: some families write the frames of a video with the image token.
    ids, own = input_ids.numpy(), {token_id for first_found in known.values() for token_id in first_found}
    found = sum(int(np.count_nonzero(ids == token_id)) for token_id in own)
    if found != expected:
        raise BadSampleError(
            "encode",
            "media_token_mismatch",
            f"The sequence holds {found} image and video tokens, but the grids ask for {expected}; the model would "
            "refuse it.",
        )


def _count_grid(processor: Processor, medium: str, part: str, sample: Mapping[str, Any]) -> int:
    """Return how many tokens the grids of one medium ask for."""
    kept = sample.get(f"{medium}_compression_mask")
    if kept is not None and not bool(kept.all()):
        raise BadSampleError(
            "encode",
            "pixels_decide_tokens",
            f"{type(processor).__name__} leaves out what is alike in frames that follow each other, so the number of "
            f"tokens depends on pixels, which no plan knows; set {part}.use_token_compression to False.",
        )
    owner = getattr(processor, part, None)
    merge = getattr(owner, "merge_size", None) or 2
    rows = sample[f"{medium}_grid_thw"].tolist()
    if type(processor).__name__ in _ROWS_END:
        side = merge * getattr(owner, "spatial_patch_size", 1)
        around = 2 * bool(getattr(processor, "cat_extra_token", True))
        return sum((height // side) * (width // side + 1) + around for _, height, width in rows)
    first = 1 if type(processor).__name__ in _TIME_POOLED else 0
    per_token = merge[0] * merge[1] if isinstance(merge, (tuple, list)) else merge**2
    return sum(prod(row[first:]) // per_token for row in rows)


def _holds(token: str, parts: tuple[str, ...]) -> bool:
    return any(part in token.lower() for part in parts)


def _token_id(tokenizer: Any, token: str) -> int | None:
    try:
        token_id = tokenizer.convert_tokens_to_ids(token)
    except Exception:  # tokenizers answer unknown tokens with an id, with None, or with any error
        return None
    known = isinstance(token_id, int) and token_id != getattr(tokenizer, "unk_token_id", None)
    return token_id if known else None


@dataclass(slots=True)
class TypedMarkers:
    """The control strings that one conversation's texts hold, in the order of their private characters."""

    strings: list[str] = field(default_factory=list)

    def character(self, marker: str) -> str:
        """Return the private character that stands for the string."""
        if marker not in self.strings:
            self.strings.append(marker)
        return chr(_PRIVATE_BEGIN + self.strings.index(marker))


def disguise(conversation: Conversation, chat: ChatFormat) -> tuple[Conversation, TypedMarkers | None]:
    """Return the conversation with typed control strings replaced; the same object when there are none."""
    control = chat.control
    if control is None:
        return conversation, None
    _refuse_split_markers(conversation, control)
    texts = _strings(conversation)
    if not any(map(control.search, texts)):
        return conversation, None
    if any(map(_PRIVATE.search, texts)):
        raise BadSampleError(
            "encode", "reserved_character", "The text holds control tokens and characters of U+10F000..U+10FFFF."
        )
    markers = TypedMarkers()

    def replace(value: Any) -> Any:
        if isinstance(value, str):
            return control.sub(lambda match: markers.character(match.group()), value)
        if isinstance(value, dict):
            return {key: item if key in _KEPT_KEYS else replace(item) for key, item in value.items()}
        return [replace(item) for item in value] if isinstance(value, list) else value

    return replace(conversation), markers


def _refuse_split_markers(conversation: Conversation, control: re.Pattern[str]) -> None:
    """Raise where the texts of a turn hold a control string only together: templates write them side by side."""
    for message in conversation:
        content = message.get("content")
        items = content if isinstance(content, list) else []
        texts = [item.get("text") if isinstance(item, dict) and item.get("type") == "text" else None for item in items]
        for is_text, run in groupby(texts, key=lambda text: isinstance(text, str)):
            pieces = [str(text) for text in run]
            split = is_text and len(pieces) > 1
            if split and len(control.findall("".join(pieces))) > sum(len(control.findall(piece)) for piece in pieces):
                raise BadSampleError(
                    "encode",
                    "typed_markers",
                    "Texts of one turn spell a control token together, which would make a turn or a medium that nobody "
                    "sent. Join them into one text, which is then written as text.",
                )


def _strings(conversation: Conversation) -> list[str]:
    """Return all strings that may hold typed markers, in no order."""
    found: list[str] = []
    left: list[Any] = list(conversation)
    for value in left:  # it grows on the way
        if isinstance(value, dict):
            for key, item in value.items():
                if key not in _KEPT_KEYS:
                    (found if isinstance(item, str) else left).append(item)
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str):
            found.append(value)
    return found


def splice_plain(
    processor: Processor, text: str, ids: npt.NDArray[np.int64], markers: TypedMarkers
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ids in which typed strings are plain text, and for each of them its old position (-1: it is new)."""
    tokenizer = tokenizer_of(processor)
    added = sorted(map(str, tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    pieces = re.split("|".join(map(re.escape, added)), text) if added else [text]
    out: list[npt.NDArray[np.int64]] = []
    origin: list[npt.NDArray[np.int64]] = []
    cursor = 0
    for piece in filter(_PRIVATE.search, pieces):
        # Some tokens swallow blanks beside them.
        found = find_text(tokenizer, (piece, piece.lstrip(), piece.rstrip(), piece.strip()), ids, cursor)
        if found is None:
            raise BadSampleError(
                "encode",
                "typed_markers",
                "A text holds control tokens and this tokenizer does not let them be written as text.",
            )
        begin, end = found
        plain = _plain_ids(tokenizer, piece, markers)
        out += [ids[cursor:begin], plain]
        origin += [np.arange(cursor, begin), np.full(len(plain), -1)]
        cursor = end
    return np.concatenate([*out, ids[cursor:]]), np.concatenate([*origin, np.arange(cursor, len(ids))])


def find_text(tokenizer: Any, forms: Iterable[str], ids: npt.NDArray[np.int64], cursor: int) -> tuple[int, int] | None:
    """Return begin and end of the leftmost occurrence of a text at or after `cursor`, in the first form that occurs."""
    for form in dict.fromkeys(forms):
        pattern = _encode(tokenizer, form)
        places = find_ids(ids[cursor:], pattern)
        if len(places):
            return cursor + int(places[0]), cursor + int(places[0]) + len(pattern)
    return None


def find_ids(ids: npt.NDArray[np.int64], pattern: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return where the pattern begins in the ids."""
    if not len(pattern) or len(pattern) > len(ids):
        return np.zeros(0, dtype=np.int64)
    places = np.flatnonzero(ids[: len(ids) - len(pattern) + 1] == pattern[0])
    for offset in range(1, len(pattern)):
        places = places[ids[places + offset] == pattern[offset]]
    return places


def _plain_ids(tokenizer: Any, piece: str, markers: TypedMarkers) -> npt.NDArray[np.int64]:
    parts = [""]
    for character in re.split("([\U0010f000-\U0010ffff])", piece):
        if not _PRIVATE.fullmatch(character):
            parts[-1] += character
            continue
        marker = markers.strings[ord(character) - _PRIVATE_BEGIN]
        parts[-1] += marker[0]
        parts.append(marker[1:])
    return np.concatenate([_encode(tokenizer, part) for part in parts if part])


def _encode(tokenizer: Any, text: str) -> npt.NDArray[np.int64]:
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)
