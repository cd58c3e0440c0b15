"""Any processor whose chat template and call follow transformers' conventions.

Enters: conversations. Leaves: the processor's batch with shifted labels, pixels in bfloat16, media counts per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from vlm_stream.collate.examples import conversations_of, count_media, drop_overlong, mask_fake_images
from vlm_stream.collate.join_media import PIXEL_KEYS
from vlm_stream.collate.process_batch import process_batch
from vlm_stream.collate.rows import cut_rows, pad_id_of, pad_to, shift
from vlm_stream.encode import IGNORE, build_labels_from_template
from vlm_stream.pixels import PIXELS_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vlm_stream.conversation import Conversation

__all__ = ["as_bfloat16", "collate_conversations", "default_collate_fn", "finish"]


def default_collate_fn(
    examples: Sequence[Mapping[str, Any]],
    processor: Any,
    max_length: int | None = None,
    _post_tokenize_hook: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None,
    *,
    drop_overlong: bool = False,
    pixels: Literal["full", "compact"] = "full",
) -> dict[str, Any]:
    """Collate conversations for any processor.

    Args:
        examples: `{"conversation": [...]}`; media as paths, bytes or decoded objects. They are not changed.
        processor: The model's processor.
        max_length: Every batch gets this many tokens before the shift; longer rows are cut, never through media.
        _post_tokenize_hook: `(batch, processor) -> batch`, called right after tokenising.
        drop_overlong: Leave out rows that are estimated to be longer than `max_length`, instead of cutting them.
        pixels: `compact` leaves pixels as bytes for `finish_pixels`, where the family has such a path.

    Returns:
        The batch; see the module.
    """
    examples, batch = collate_conversations(examples, processor, max_length if drop_overlong else None, pixels)
    if _post_tokenize_hook is not None:
        batch = _call_hook(_post_tokenize_hook, batch, conversations_of(examples), processor)
    return finish(batch, examples, processor, max_length)


def collate_conversations(
    examples: Sequence[Mapping[str, Any]],
    processor: Any,
    drop_above: int | None = None,
    pixels: Literal["full", "compact"] = "full",
) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    """Return the examples that were kept, and their batch with labels, not shifted."""
    if drop_above is not None:
        _, kept = drop_overlong(conversations_of(examples), processor, drop_above)
        examples = [examples[index] for index in kept]
    return examples, process_batch(conversations_of(examples), processor, pixels=pixels)


def finish(
    batch: dict[str, Any], examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None
) -> dict[str, Any]:
    """Cut or pad to `max_length`, hide fake images, shift, count media."""
    if max_length is not None:
        batch = pad_to(cut_rows(batch, max_length, processor), max_length, pad_id_of(processor))
    batch = shift(mask_fake_images(as_bfloat16(batch), examples, processor))
    return batch | count_media(conversations_of(examples)) | _num_patches(batch, processor)


def _call_hook(
    hook: Callable[[dict[str, Any], Any], dict[str, Any]],
    batch: dict[str, Any],
    conversations: Sequence[Conversation],
    processor: Any,
) -> dict[str, Any]:
    """Let the hook change the tokenised batch; labels are made anew when it changed the ids."""
    labels = batch.pop("labels")
    before = batch["input_ids"]
    batch = hook(dict(batch), processor)
    if not torch.equal(batch["input_ids"], before):
        labels = build_labels_from_template(batch["input_ids"], conversations, processor)
        labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORE)
    return batch | {"labels": labels}


def as_bfloat16(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch with its pixels in bfloat16, one tensor or a list of them; compact ones stay as they are."""
    out = dict(batch)
    for key in PIXEL_KEYS:
        pixels = out.get(key)
        if PIXELS_KEY in out:  # bytes, which are finished later
            continue
        if isinstance(pixels, torch.Tensor):
            out[key] = pixels.to(torch.bfloat16)
        elif isinstance(pixels, (list, tuple)):
            out[key] = [image.to(torch.bfloat16) for image in pixels]
    return out


def _num_patches(batch: Mapping[str, Any], processor: Any) -> dict[str, torch.Tensor]:
    """Return the image tokens per row, which models with 5-D pixels (tiles) are cut by."""
    token_id = getattr(processor, "image_token_id", None)
    pixels = batch.get("pixel_values")
    if token_id is None or not isinstance(pixels, torch.Tensor) or pixels.ndim != 5:
        return {}
    return {"num_patches": (batch["input_ids"] == token_id).sum(dim=1)}
