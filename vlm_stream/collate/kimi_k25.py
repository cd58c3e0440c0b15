"""Kimi-K2.5: one placeholder per image becomes as many as the vision tower gives tokens, before the model runs.

Two processors carry this name. The published remote code takes `medias`, leaves one placeholder per image and returns
`grid_thws`: its placeholders are expanded here, so that no pipeline stage changes a sequence's length. The class inside
transformers takes images and videos and expands them itself. Both leave as the same batch.
"""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.collate.examples import conversations_of, count_media, drop_overlong, mask_fake_images
from vlm_stream.collate.process_batch import prepare, process_batch
from vlm_stream.collate.rows import cut_rows, pad_id_of, pad_rows, pad_to, shift
from vlm_stream.encode import EncodeConfig, Encoder, tokenizer_of
from vlm_stream.packs.media import join_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.conversation import Conversation

__all__ = ["expand_image_tokens", "kimi_k25_vl_collate_fn"]

logger = logging.getLogger(__name__)

_MEDIA_PAD: Final = "<|media_pad|>"
_MEDIA_PAD_ID: Final = 163605  # in the published vocabulary


def kimi_k25_vl_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None = None, drop_overlong: bool = False
) -> dict[str, Any]:
    """Collate conversations for Kimi-K2.5.

    Args:
        examples: `{"conversation": [...]}`.
        processor: The model's processor, remote or from transformers.
        max_length: Length of every batch before the shift; longer rows are cut (media that the cut would tear are
            taken out, and reported), or dropped.
        drop_overlong: Drop rows that are too long instead of cutting them.

    Returns:
        `input_ids`, `attention_mask`, `labels` (shifted), `pixel_values`, `grid_thws` [N, 3], `image_grid_hws` [N, 2],
        `n_images_per_sample` [B] with zeros; the class inside transformers adds its own keys, videos among them.

    Raises:
        ValueError: When every row is too long, or placeholders and images differ in number.
    """
    if max_length is not None and drop_overlong:
        examples = _estimate_drop(examples, processor, max_length)
    if "medias" in inspect.signature(type(processor).__call__).parameters:
        batch = _remote_batch(examples, processor, max_length, drop_overlong)
    else:
        batch = _native_batch(examples, processor, max_length)
    return batch


def _estimate_drop(examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int) -> list[Mapping[str, Any]]:
    _, kept = drop_overlong(conversations_of(examples), processor, max_length)
    return [examples[index] for index in kept]


def _native_batch(examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None) -> dict[str, Any]:
    conversations = conversations_of(examples)
    batch = process_batch(conversations, processor, {"padding_side": "right"})
    if max_length is not None:
        batch = pad_to(cut_rows(batch, max_length, processor), max_length, pad_id_of(processor))
    batch = shift(mask_fake_images(batch, examples, processor)) | count_media(conversations)
    if "image_grid_thw" in batch:
        batch |= {"grid_thws": batch["image_grid_thw"], "image_grid_hws": batch["image_grid_thw"][:, 1:]}
    return batch


def _remote_batch(
    examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None, drop: bool
) -> dict[str, Any]:
    encoder = Encoder(processor, EncodeConfig())
    rows, kept = [], []
    for example in examples:
        row = _remote_row(encoder, example["conversation"])
        length = len(row["input_ids"])
        if max_length is not None and length > max_length:
            if drop:
                logger.warning("Dropped a row of %d tokens, more than %d.", length, max_length)
                continue
            row = _cut(row, max_length, _media_id(processor), pad_id_of(processor))
        rows.append(row)
        kept.append(example)
    if not rows:
        raise ValueError(f"All samples in batch exceed max_length={max_length}.")
    batch: dict[str, Any] = dict(pad_rows(rows, pad_id=pad_id_of(processor), length=max_length))
    batch = shift(mask_fake_images(batch, kept, processor))
    pixels = [row["pixel_values"] for row in rows if row.get("pixel_values") is not None]
    grids = [row["grid_thws"] for row in rows if row.get("grid_thws") is not None]
    if pixels:
        batch["pixel_values"] = join_rows("pixel_values", pixels)
    if grids:
        batch["grid_thws"] = torch.cat(grids)
        batch["image_grid_hws"] = batch["grid_thws"][:, 1:]
        counts = [0 if row.get("grid_thws") is None else len(row["grid_thws"]) for row in rows]
        batch["n_images_per_sample"] = torch.tensor(counts, dtype=torch.int64)
    return batch


def _remote_row(encoder: Encoder, conversation: Conversation) -> dict[str, Any]:
    """Encode one conversation with the remote processor; labels follow the expanded placeholders."""
    processor = encoder.processor
    prepared = prepare(encoder, conversation)
    medias = [{"type": "image", "image": image} for image in prepared.loaded.images]
    out = processor(text=prepared.rendered.text, return_tensors="pt", **({"medias": medias} if medias else {}))
    row: dict[str, Any] = {"input_ids": out["input_ids"][0], "attention_mask": out["attention_mask"][0]}
    if prepared.markers is not None:
        row |= encoder.splice(row, prepared.rendered, prepared.markers)
    grids = out.get("grid_thws")
    if grids is not None:
        row["input_ids"], row["attention_mask"] = expand_image_tokens(
            row["input_ids"], row["attention_mask"], grids, _media_id(processor)
        )
    row["labels"] = encoder.label(conversation, prepared.rendered, row["input_ids"])
    return row | {"pixel_values": out.get("pixel_values"), "grid_thws": grids}


def expand_image_tokens(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    grid_thws: torch.Tensor,
    media_token_id: int,
    merge_kernel_size: tuple[int, int] = (2, 2),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Repeat each image's placeholder as often as the tower gives tokens: (h // kernel) * (w // kernel).

    Args:
        input_ids: [S] with one placeholder per image.
        attention_mask: [S]
        grid_thws: [N, 3] in the order of the placeholders; time is pooled and does not count.
        media_token_id: The placeholder.
        merge_kernel_size: Patches that become one token, down and across.

    Returns:
        Ids and mask of the new length; unchanged when there is no placeholder.

    Raises:
        ValueError: When placeholders and grids differ in number.
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


def _cut(row: dict[str, Any], max_length: int, media_id: int, pad_id: int) -> dict[str, Any]:
    """Cut a row; when that tears an image, what is left of its tokens and all its pixels are taken out."""
    before = int((row["input_ids"] == media_id).sum())
    cut = {key: row[key][:max_length] for key in ("input_ids", "attention_mask", "labels")}
    if int((cut["input_ids"] == media_id).sum()) == before:
        return row | cut
    logger.warning("Cutting a row at %d tokens tears an image: its pixels are taken out of the batch.", max_length)
    cut["input_ids"] = cut["input_ids"].masked_fill(cut["input_ids"] == media_id, pad_id)
    return cut | {"pixel_values": None, "grid_thws": None}


def _media_id(processor: Any) -> int:
    own = getattr(processor, "media_placeholder_token_id", None)
    if isinstance(own, int):
        return own
    tokenizer = tokenizer_of(processor)
    found = tokenizer.convert_tokens_to_ids(_MEDIA_PAD)
    is_known = isinstance(found, int) and found != getattr(tokenizer, "unk_token_id", None)
    return found if is_known else _MEDIA_PAD_ID
