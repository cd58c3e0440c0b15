"""`join_hf_packs`: packed rows -> one batch, padded to one length.

Enters: rows of `build_hf_pack`, of one family and one attention form. Leaves: the same names with `B` rows. Padding is
one more document, without labels, which no other document sees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.packs.hf_pack import padding_document
from vlm_stream.packs.keys import TOKEN_KEYS
from vlm_stream.packs.media import merge_media

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["count_media", "join_hf_packs"]

_COUNTED: Final = {
    "n_images_per_sample": ("image_grid_thw", "image_sizes", "pixel_values"),
    "n_videos_per_sample": ("video_grid_thw", "pixel_values_videos"),
}
"""By the rows of what media are counted: the first of these that a pack has."""


def join_hf_packs(
    packs: Sequence[Mapping[str, Any]],
    *,
    padding_idx: int = 0,
    pad_to: int | None = None,
    media_counts: bool = False,
) -> dict[str, Any]:
    """Stack packed rows into one batch for `model(**batch, use_cache=False)`.

    Args:
        packs: Rows of `build_hf_pack`.
        padding_idx: Token of padding slots.
        pad_to: Length of the rows; that of the longest pack if it is not given.
        media_counts: Whether to add `n_images_per_sample` and `n_videos_per_sample` `[B]`, by which `pp_media` cuts.

    Returns:
        `[B, L]` tokens, labels and types, `[4, B, L]` or `[B, L]` positions, a `[B, 1, L, L]` mask if the packs have
        one, and all media.
    """
    if not packs:
        raise ConfigError(
            "A batch of no packs cannot be made, so there is nothing to train on; give at least one pack."
        )
    forms = {tuple(sorted(key for key in TOKEN_KEYS if key in pack)) for pack in packs}
    if len(forms) > 1:
        raise ConfigError(
            f"The packs of one batch hold different model inputs ({' against '.join(map(str, sorted(forms)))}), so "
            f"they cannot be stacked. Build them with the same attention form and processor."
        )
    longest = max(pack["input_ids"].shape[1] for pack in packs)
    length = longest if pad_to is None else pad_to
    if longest > length:
        raise BadSampleError(
            "fit", "pack_too_long", f"A pack has {longest} tokens, more than the {length} of its batch's rows."
        )
    rows = [_pad_row(pack, length, padding_idx) for pack in packs]
    batch = {key: torch.cat([row[key] for row in rows], dim=1 if key == "position_ids" else 0) for key in rows[0]}
    if batch["position_ids"].shape[0] == 1:
        batch["position_ids"] = batch["position_ids"][0]
    return batch | (count_media(packs) if media_counts else {}) | merge_media(packs)


def count_media(rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return `n_images_per_sample` and `n_videos_per_sample` `[B]` of samples or packs, each where there are any."""
    counts = {name: torch.tensor([_count(row, keys) for row in rows]) for name, keys in _COUNTED.items()}
    return {name: count for name, count in counts.items() if count.any()}


def _count(pack: Mapping[str, Any], keys: Sequence[str]) -> int:
    return next((len(pack[key]) for key in keys if key in pack), 0)


def _pad_row(pack: Mapping[str, Any], length: int, padding_idx: int) -> dict[str, torch.Tensor]:
    """Return one row at its full length; positions always `[1 or 4, 1, L]`."""
    multi_axis = pack["position_ids"].ndim == 3
    keys = [key for key in ("mm_token_type_ids", "token_type_ids") if key in pack]
    fill = padding_document(length - pack["input_ids"].shape[1], padding_idx, keys, multi_axis=multi_axis)
    row = {key: torch.cat([pack[key], fill[key][None]], dim=1) for key in ("input_ids", "labels", *keys)}
    axes = pack["position_ids"] if multi_axis else pack["position_ids"][None]
    row["position_ids"] = torch.cat([axes, fill["position_ids"].reshape(len(axes), 1, -1)], dim=-1)
    mask = pack.get("attention_mask")
    if mask is not None:
        row["attention_mask"] = _grow(mask, length)
    return row


def _grow(mask: torch.Tensor, length: int) -> torch.Tensor:
    """Return the 4-D mask with slots added that see themselves alone."""
    bool_mask = mask.dtype == torch.bool
    hidden, seen = (False, True) if bool_mask else (torch.finfo(mask.dtype).min, 0.0)
    grown = torch.full((1, 1, length, length), hidden, dtype=mask.dtype)
    grown.diagonal(dim1=-2, dim2=-1).fill_(seen)
    grown[..., : mask.shape[-1], : mask.shape[-1]] = mask
    return grown
