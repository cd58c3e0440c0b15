"""Packed rows for trainers that take document masks or THD, in the form of NeMo Automodel's neat packing.

Enters: samples of `shift_sample`. Leaves: one packed sample per row (`build_packed_vlm_sample`), whose `attention_mask`
numbers the documents 1, 2, ... (0: padding); then a batch of them, with a mask (`neat_packed_vlm_collater`) or with the
lengths of the documents (`packed_sequence_thd_vlm_collater`). Nothing is shifted here.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn.functional import pad

from vlm_stream.collate.documents import (
    BLOCK_CAUSAL,
    FLASH,
    PackingContract,
    align_up,
    as_documents,
    mask_documents,
    sequence_metadata,
)
from vlm_stream.collate.media import counts_of, merge_media
from vlm_stream.collate.rows import pad_rows, shift_sample
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.keys import IGNORE, POSITIONS_KEY, Sample

PACKED_MEDIA_KEYS: Final = (
    "pixel_values",
    "image_grid_thw",
    "image_position_ids",
    "pixel_values_videos",
    "video_grid_thw",
    "second_per_grid_ts",
)
"""The media that packed samples always name, None where a pack has none (NeMo Automodel's `MEDIA_KEYS`)."""


def build_packed_vlm_sample(
    samples: Sequence[Sample], pack_size: int, padding_idx: int, has_mrope: bool = False, sequence_alignment: int = 1
) -> dict[str, Any]:
    """Join shifted samples into one row.

    Args:
        samples: What `shift_sample` returned, in order.
        pack_size: The most tokens that the row may have; it is not padded to them, collation does that.
        padding_idx: Token of the slots that align a document.
        has_mrope: Whether samples carry `position_ids` `[3, n]`.
        sequence_alignment: Every document is padded to a multiple of it, as context parallelism wants.

    Returns:
        `input_ids`, `labels`, `attention_mask` (document numbers from 1), `mm_token_type_ids` `[L]`; `position_ids`
        `[L]`, or `[3, L]` with mRoPE; `seq_lens`, `seq_lens_padded`; `n_images`, `n_videos`; `PACKED_MEDIA_KEYS`.

    Raises:
        BadSampleError: Nothing is left to pack, or it is more than `pack_size`.
    """
    if sequence_alignment < 1:
        raise ConfigError(f"sequence_alignment is {sequence_alignment}, which aligns nothing; give 1 or more.")
    documents = as_documents(samples)
    seq_lens = [len(document["input_ids"]) for document in documents]
    padded = [align_up(length, sequence_alignment) for length in seq_lens]
    if sum(padded) > pack_size:
        raise BadSampleError(
            "fit",
            "pack_too_long",
            f"The {len(documents)} documents of a pack have {sum(padded)} tokens ({padded}), more than pack_size "
            f"{pack_size}; the row would not fit its batch. Plan with a packing_ratio below 1, or leave one out.",
        )
    mrope = has_mrope and any(POSITIONS_KEY in document for document in documents)
    rows = [_align(document, slots, padding_idx, mrope) for document, slots in zip(documents, padded, strict=True)]
    media = merge_media(documents)
    return {
        **{key: torch.cat([row[key] for row in rows], dim=-1) for key in rows[0]},
        "attention_mask": torch.cat([torch.full((slots,), d) for d, slots in enumerate(padded, start=1)]),
        "seq_lens": seq_lens,
        "seq_lens_padded": padded,
        "n_images": len(media.get("image_grid_thw", ())),
        "n_videos": len(media.get("video_grid_thw", ())),
        **dict.fromkeys(PACKED_MEDIA_KEYS),
        **media,
    }


def pack_row(
    samples: Sequence[Sample],
    pack_size: int,
    padding_idx: int,
    rule: Callable[[Sample], torch.Tensor | None] | None,
    alignment: int = 1,
    *,
    shifted: bool = True,
) -> dict[str, Any]:
    """Join encoded samples, not shifted, into one row, with the positions of a rule; without one they count on by one.

    With `shifted=False` the loss shifts labels, and the first of each document is IGNORE: the token before it is of
    another document. Other arguments are those of `build_packed_vlm_sample`.
    """
    rows = [sample if rule is None else {**sample, POSITIONS_KEY: rule(sample)} for sample in samples]
    if shifted:
        rows = [shift_sample(row, has_mrope=rule is not None) for row in rows]
    else:
        rows = [{**row, "labels": pad(row["labels"][1:], (1, 0), value=IGNORE)} for row in rows]
    return build_packed_vlm_sample(rows, pack_size, padding_idx, rule is not None, alignment)


def _align(document: Sample, slots: int, padding_idx: int, mrope: bool) -> dict[str, torch.Tensor]:
    """Return the rows of one document, padded to its slots; positions count on through the padding."""
    length = len(document["input_ids"])
    fills = {"input_ids": padding_idx, "labels": IGNORE, "mm_token_type_ids": 0}
    absent = torch.zeros(length, dtype=torch.long)
    rows = {
        key: torch.cat([document.get(key, absent).long(), torch.full((slots - length,), fill)])
        for key, fill in fills.items()
    }
    rows[POSITIONS_KEY] = torch.arange(slots)
    if mrope:
        own = document.get(POSITIONS_KEY)
        own = torch.arange(length).expand(3, -1) if own is None else own
        beyond = torch.arange(slots - length) + (int(own.max()) + 1 if length else 0)
        rows[POSITIONS_KEY] = torch.cat([own, beyond.expand(3, -1)], dim=1)
    return rows


def neat_packed_vlm_collater(
    batch: list[dict[str, Any]],
    padding_idx: int = 0,
    max_length: int | None = None,
    attn_implementation: str | None = None,
    materialize_4d_mask: bool = True,
    *,
    packing: PackingContract | None = None,
) -> dict[str, Any]:
    """Collate packed samples with the mask form that the attention backend wants.

    Args:
        batch: Packed samples of any lengths.
        padding_idx: Token id of padding.
        max_length: Length of every batch; None: that of the longest pack.
        attn_implementation: The flash_attention family keeps the mask `[B, S]` of document numbers; `mask4d` gets a
            mask `[B, 1, S, S]` that is added to scores, anything else a boolean one.
        materialize_4d_mask: False keeps document numbers in place of any 4-D mask.
        packing: Which form the model takes, whatever the backend.

    Returns:
        `input_ids`, `labels`, `mm_token_type_ids` `[B, S]`, `position_ids` `[B, S]` or `[3, B, S]`, `attention_mask` or
        what the contract asks for in its place, the joined media with pixels in bfloat16, and `_packed_seq_ids`
        `[B, S]` (document numbers) where rows hold several documents.

    Raises:
        ConfigError: A pack is longer than `max_length`.
    """
    if not batch:
        return {}
    longest = max(len(pack["input_ids"]) for pack in batch)
    if max_length is not None and longest > max_length:
        raise ConfigError(
            f"A pack has {longest} tokens but batches are padded to {max_length}; cutting it would lose labels and "
            "media. Pack with a capacity of at most max_length, or raise max_length."
        )
    tokens = pad_rows(batch, pad_id=padding_idx, length=max_length)
    documents = tokens["attention_mask"]
    if packing is None:
        packing = PackingContract("document_ids") if (attn_implementation or "").startswith(FLASH) else BLOCK_CAUSAL
    form, wants_lengths = packing.packed_mask_type, packing.requires_packed_sequence_metadata
    if form == "block_causal" and not materialize_4d_mask:
        form = "document_ids"
    out: dict[str, Any] = {
        "input_ids": tokens["input_ids"],
        "labels": tokens["labels"],
        "mm_token_type_ids": tokens.get("mm_token_type_ids", torch.zeros_like(documents)),
        POSITIONS_KEY: _pad_positions(batch, documents.shape[1]),
        **mask_documents(documents, form, torch.float32 if attn_implementation == "mask4d" else torch.bool),
        **(sequence_metadata(documents) if wants_lengths else {}),
    }
    if not materialize_4d_mask or wants_lengths or bool((documents > 1).any()):
        out["_packed_seq_ids"] = documents
    return out | _media(batch)


def packed_sequence_thd_vlm_collater(
    batch: list[dict[str, Any]],
    padding_idx: int = 0,
    max_length: int | None = None,
    seq_lens_padding_value: int = -1000,
) -> dict[str, Any]:
    """Collate packed samples into THD layout: no mask, but the documents' lengths, for kernels that take those.

    Args:
        batch: Packed samples; `seq_lens` and `seq_lens_padded` (both or neither) give the documents' lengths, otherwise
            they are counted in the mask of document numbers.
        padding_idx: Token id of padding.
        max_length: Length of every row; None: that of the longest pack.
        seq_lens_padding_value: Fills the rows of the length tables.

    Returns:
        `input_ids`, `labels`, `position_ids`, `seq_lens`, `seq_lens_padded` `[B, most documents]`, `qkv_format`, and
        the joined media with pixels in bfloat16.

    Raises:
        ValueError: A pack is too long, or its lengths contradict themselves or its tokens.
    """
    if not batch:
        return {}
    longest = max(len(pack["input_ids"]) for pack in batch)
    if max_length is not None and longest > max_length:
        raise ValueError(
            f"A pack has {longest} tokens, more than max_length={max_length}; pack with a smaller capacity."
        )
    tokens = pad_rows(batch, pad_id=padding_idx, length=max_length)
    length = tokens["input_ids"].shape[1]
    real, padded = [], []
    for pack in batch:
        lengths, slots = _document_lengths(pack)
        if slots:  # the padding of the row belongs to its last document
            slots = [*slots[:-1], slots[-1] + length - len(pack["input_ids"])]
        real.append(lengths)
        padded.append(slots)
    return {
        "input_ids": tokens["input_ids"],
        "labels": tokens["labels"],
        POSITIONS_KEY: _pad_positions(batch, length),
        "seq_lens": length_table(real, seq_lens_padding_value),
        "seq_lens_padded": length_table(padded, seq_lens_padding_value),
        "qkv_format": "thd",
    } | _media(batch)


def _media(batch: Sequence[Sample]) -> dict[str, Any]:
    """Return the joined media of packs, and how many images and videos each has."""
    counts = [[int(pack.get(key) or 0) for pack in batch] for key in ("n_images", "n_videos")]
    return merge_media(batch, pixel_dtype=torch.bfloat16) | counts_of(*counts)


def _pad_positions(batch: Sequence[Sample], length: int) -> torch.Tensor:
    """Return `[B, length]`, or `[axes, B, length]` when some pack has several position axes (mRoPE)."""
    axes = max((pack[POSITIONS_KEY].shape[0] for pack in batch if pack[POSITIONS_KEY].ndim == 2), default=0)
    has_parts = any(pack[POSITIONS_KEY].is_floating_point() for pack in batch)  # of seconds, in Qwen-Omni's videos
    out = torch.zeros((axes or 1, len(batch), length), dtype=torch.float32 if has_parts else torch.int64)
    for row, pack in enumerate(batch):
        positions = pack[POSITIONS_KEY]  # [axes, L], or [L] for a pack without media: the same on every axis
        out[:, row, : positions.shape[-1]] = positions
    return out if axes else out[0]


def _document_lengths(pack: Sample) -> tuple[list[int], list[int]]:
    """Return real and padded lengths of a pack's documents."""
    real, wide = pack.get("seq_lens"), pack.get("seq_lens_padded")
    if (real is None) != (wide is None):
        raise ValueError("A pack has one of seq_lens and seq_lens_padded; it needs both or neither.")
    if real is None or wide is None:
        counts: list[int] = torch.bincount(pack["attention_mask"])[1:].tolist()
        return counts, counts
    real, wide = [int(n) for n in real], [int(n) for n in wide]
    if len(real) != len(wide) or any(not 0 <= r <= w for r, w in zip(real, wide, strict=False)):
        raise ValueError(f"seq_lens {real} do not fit into seq_lens_padded {wide}.")
    if sum(wide) != len(pack["input_ids"]):
        raise ValueError(f"seq_lens_padded add up to {sum(wide)}, but the pack has {len(pack['input_ids'])} tokens.")
    return real, wide


def length_table(rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
    """Return rows of different lengths as one table, filled with a value that no length has."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], dtype=torch.int64)
