"""Which tokens of a vocabulary stand for media, and whether a sequence holds as many of them as its grids say.

Enters: a processor, and ids with the grids that came with them. Leaves: ids and strings of media tokens; the number
that is expected. Families name these tokens in many ways, so they are looked up by attribute, by name and by what the
name contains.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from vlm_stream.errors import BadSampleError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["check_media_tokens", "media_token_ids", "media_token_strings", "resolve_token_id", "vision_token_ids"]

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

_cache: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()


def vision_token_ids(processor: Any) -> frozenset[int]:
    """Return the ids of all tokens that stand for images or videos or frame them; empty when none is known."""
    known = _cache.get(processor)
    if known is None:
        known = _cache[processor] = _find_vision_ids(processor)
    return known


def _find_vision_ids(processor: Any) -> frozenset[int]:
    tokenizer = getattr(processor, "tokenizer", None)
    found: set[int] = set()
    for owner in (processor, getattr(processor, "config", None)):
        values = (getattr(owner, name, None) for name in _ID_ATTRIBUTES)
        found |= {value for value in values if isinstance(value, int) and not isinstance(value, bool)}
    for token in _VISION_STRINGS:
        token_id = _token_id(tokenizer, token)
        if token_id is not None:
            found.add(token_id)
    found |= {index for token, index in _added(tokenizer).items() if any(p in token.lower() for p in _VISION_PARTS)}
    return frozenset(found)


def media_token_strings(processor: Any) -> set[str]:
    """Return the texts that a processor reads as media, or writes for them: what no user may type as tokens."""
    tokenizer = getattr(processor, "tokenizer", None)
    added = _added(tokenizer)
    vision = vision_token_ids(processor)
    found = {token for token, index in added.items() if index in vision}
    found |= {token for token in added if any(part in token.lower() for part in _PLACEHOLDER_PARTS)}
    for owner in (processor, tokenizer):
        found |= {token for name in _TOKEN_ATTRIBUTES if isinstance(token := getattr(owner, name, None), str)}
    return found - {""}


def media_token_ids(processor: Any) -> frozenset[int]:
    """Return the ids of every token that stands for an image, a video or audio, or frames one."""
    added = _added(getattr(processor, "tokenizer", None))
    return vision_token_ids(processor) | {added[token] for token in media_token_strings(processor) if token in added}


def resolve_token_id(processor: Any, medium: str) -> int | None:
    """Return the id of the token that is repeated for each patch of an image or a video, if it can be found."""
    tokenizer = getattr(processor, "tokenizer", None)
    owners = (processor, getattr(processor, "config", None), tokenizer, getattr(tokenizer, "config", None))
    for owner in owners:
        for name in (f"{medium}_token_id", f"{medium}_token_index", f"{medium}_token"):
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
            if isinstance(value, str) and (token_id := _token_id(tokenizer, value)) is not None:
                return token_id
    for token in (f"<|{medium}_pad|>", f"<{medium}>", f"<|{medium}|>"):
        if (token_id := _token_id(tokenizer, token)) is not None:
            return token_id
    return None


def check_media_tokens(processor: Any, input_ids: torch.Tensor, sample: Mapping[str, Any]) -> None:
    """Raise `BadSampleError` when ids [S] hold another number of media tokens than the grids ask for."""
    if sample.get("image_grid_thw") is None and sample.get("video_grid_thw") is None:
        return
    expected = 0
    tokens: set[int] = set()
    for medium, grid_key, part in _GRIDS:
        grid = sample.get(grid_key)
        token_id = resolve_token_id(processor, medium)
        if token_id is not None:
            tokens.add(token_id)  # some families write the frames of a video with the image token
        if grid is None:
            continue
        if token_id is None:
            return
        merge = getattr(getattr(processor, part, None), "merge_size", None) or 2
        per_token = merge[0] * merge[1] if isinstance(merge, (tuple, list)) else merge**2
        first = 1 if _pools_time(processor) else 0
        expected += sum(prod(row[first:]) // per_token for row in grid.tolist())
    ids = input_ids.numpy()
    found = sum(int(np.count_nonzero(ids == token_id)) for token_id in tokens)
    if found != expected:
        raise BadSampleError(
            "encode",
            "media_token_mismatch",
            f"The sequence holds {found} image and video tokens, but the grids ask for {expected}; the model would "
            "refuse it.",
        )


def _pools_time(processor: Any) -> bool:
    """Say whether all frames of one grid row share their tokens, as in Kimi-K2.5's chunks of frames."""
    return type(processor).__name__ in ("Kimi_K25Processor", "KimiK25Processor")


def _added(tokenizer: Any) -> dict[str, int]:
    decoder = getattr(tokenizer, "added_tokens_decoder", None)
    return {str(token): int(index) for index, token in decoder.items()} if isinstance(decoder, dict) else {}


def _token_id(tokenizer: Any, token: str) -> int | None:
    try:
        token_id = tokenizer.convert_tokens_to_ids(token)
    except Exception:  # tokenizers answer unknown tokens with an id, with None, or with any error
        return None
    known = isinstance(token_id, int) and token_id != getattr(tokenizer, "unk_token_id", None)
    return token_id if known else None
