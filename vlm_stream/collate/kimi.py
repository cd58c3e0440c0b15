"""Kimi-VL and Kimi-K2.5: how their published remote code is called, and rows that are cut between images.

Both ship outside of transformers; its own class of Kimi-K2.5 follows its conventions and needs none of this but the
names of grids.
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from vlm_stream.collate.media import merge_media
from vlm_stream.collate.rows import pad_id_of, pad_rows, padding_side
from vlm_stream.encode import LoadedMedia, call_processor, tokenizer_of
from vlm_stream.keys import TOKEN_KEYS

logger = logging.getLogger(__name__)

_MEDIA_PAD: Final = "<|media_pad|>"
_MEDIA_PAD_ID: Final = 163605  # in the published vocabulary


def call_flat(
    processor: Any, texts: Sequence[str], loaded: Sequence[LoadedMedia], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Call Kimi-VL's remote code, which takes the images of all rows as one list."""
    images = [image for media in loaded for image in media.images]
    own = {"add_special_tokens": False} | ({"images": images} if images else {})
    return call_processor(processor, texts, loaded, {**own, **options})


def takes_medias(processor: Any) -> bool:
    """Say whether this is the published remote code of Kimi-K2.5, not transformers' class."""
    return "medias" in inspect.signature(type(processor).__call__).parameters


def call_medias(
    processor: Any, texts: Sequence[str], loaded: Sequence[LoadedMedia], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Call Kimi-K2.5's remote code, row by row; it leaves one placeholder per image, which is expanded here.

    So no pipeline stage changes the length of a sequence.
    """
    rows = []
    for text, media in zip(texts, loaded, strict=True):
        medias = [{"type": "image", "image": image} for image in media.images]
        # Without media the published class refuses a text; its tokenizer takes it.
        out = processor(text=text, medias=medias, return_tensors="pt") if medias else None
        out = tokenizer_of(processor)([text], return_tensors="pt") if out is None else out
        ids, mask = out["input_ids"][0], out["attention_mask"][0]
        grids = out.get("grid_thws")
        if grids is not None:
            ids, mask = expand_image_tokens(ids, mask, grids, kimi_media_id(processor))
        pixels = {key: out[key] for key in ("pixel_values", "grid_thws") if out.get(key) is not None}
        rows.append({"input_ids": ids, "attention_mask": mask, **pixels})
    side = str(options.get("padding_side") or padding_side(processor))
    return {**pad_rows(rows, pad_id=pad_id_of(processor), side=side), **merge_media(rows)}


def add_kimi_grids(batch: dict[str, Any], processor: Any) -> dict[str, Any]:  # noqa: ARG001 - a family's extras
    """Name the grids as both of the family's models do: `grid_thws` `[N, 3]` and `image_grid_hws` `[N, 2]`."""
    grids = batch.get("grid_thws", batch.get("image_grid_thw"))
    return batch if grids is None else batch | {"grid_thws": grids, "image_grid_hws": grids[:, 1:]}


def expand_image_tokens(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    grid_thws: torch.Tensor,
    media_token_id: int,
    merge_kernel_size: tuple[int, int] = (2, 2),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat each image's placeholder as often as the tower gives tokens: (h // kernel) * (w // kernel).

    Args:
        input_ids: `[S]` with one placeholder per image.
        attention_mask: `[S]`
        grid_thws: `[N, 3]` in the order of the placeholders; time is pooled and does not count.
        media_token_id: The placeholder.
        merge_kernel_size: Patches that become one token, down and across.

    Returns:
        Ids and mask of the new length; unchanged when there is no placeholder.

    Raises:
        ValueError: Placeholders and grids differ in number.
    """
    places = input_ids == media_token_id
    num_places = int(places.sum())
    if not num_places:
        return input_ids, attention_mask
    if num_places != len(grid_thws):
        raise ValueError(f"The text has {num_places} image placeholders and the processor gave {len(grid_thws)} grids.")
    repeats = torch.ones_like(input_ids)
    repeats[places] = (grid_thws[:, 1] // merge_kernel_size[0]) * (grid_thws[:, 2] // merge_kernel_size[1])
    mask = attention_mask.masked_fill(places, 1)
    return input_ids.repeat_interleave(repeats), mask.repeat_interleave(repeats)


def cut_kimi_row(row: dict[str, Any], max_length: int, processor: Any) -> dict[str, Any]:
    """Cut a row; if that tears an image, what is left of its tokens and all pixels of the row are taken out."""
    media_id = kimi_media_id(processor)
    cut: dict[str, Any] = {key: row[key][:max_length] for key in TOKEN_KEYS if key in row}
    if torch.equal((row["input_ids"] == media_id).sum(), (cut["input_ids"] == media_id).sum()):
        return row | cut
    logger.warning("Cutting a row at %d tokens tears an image: its pixels are taken out of the batch.", max_length)
    cut["input_ids"] = cut["input_ids"].masked_fill(cut["input_ids"] == media_id, pad_id_of(processor))
    return cut


def kimi_media_id(processor: Any) -> int:
    """Return the placeholder of Kimi-K2.5's images."""
    own = getattr(processor, "media_placeholder_token_id", None)
    if isinstance(own, int):
        return own
    tokenizer = tokenizer_of(processor)
    found = tokenizer.convert_tokens_to_ids(_MEDIA_PAD)
    is_known = isinstance(found, int) and found != getattr(tokenizer, "unk_token_id", None)
    return found if is_known else _MEDIA_PAD_ID
