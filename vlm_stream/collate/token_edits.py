"""Edits of token rows that single families need: placeholders, cuts, prefixes, and hooks of users.

Enters: ids, masks and labels that are not shifted. Leaves: the same, longer or shorter.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.collate.conversations import conversations_of
from vlm_stream.collate.rows import pad_id_of, pad_rows, padding_side, split_rows
from vlm_stream.encode import build_labels_from_template, tokenizer_of
from vlm_stream.keys import IGNORE, TOKEN_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vlm_stream.collate.conversations import Example

logger = logging.getLogger(__name__)

_MEDIA_PAD: Final = "<|media_pad|>"
_MEDIA_PAD_ID: Final = 163605  # in the published vocabulary
_GEMMA4_MODEL_TURN: Final = "<|turn>model\n"
GEMMA4_THINKING_PREFIX: Final = "<|channel>thought\n<channel|>"


def relabel(
    hook: Callable[[dict[str, Any], Any], dict[str, Any]],
    batch: dict[str, Any],
    examples: Sequence[Example],
    processor: Any,
) -> dict[str, Any]:
    """Let a hook change a tokenised batch, which it sees without labels; they are made again if it changed the ids."""
    labels = batch.pop("labels")
    before = batch["input_ids"]
    batch = hook(dict(batch), processor)
    if not torch.equal(batch["input_ids"], before):
        labels = build_labels_from_template(batch["input_ids"], conversations_of(examples), processor)
        labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORE)
    return batch | {"labels": labels}


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


def gemma4_inject_thinking_prefix(batch: dict[str, Any], processor: Any) -> dict[str, Any]:
    r"""Return the batch `[B, S]`, or one sample `[S]`, with an empty thought before every answer.

    The large instruction-tuned models open every answer with it; without it the first loss is that of a missing habit.
    The prefix goes after every `<|turn>model\n`, visible to the model and IGNORE in the labels. Where the template
    wrote it already, it is only masked.
    """
    tokenizer = tokenizer_of(processor)
    turn, prefix = (
        torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        for text in (_GEMMA4_MODEL_TURN, GEMMA4_THINKING_PREFIX)
    )
    if not len(turn) or not len(prefix):
        return batch
    if batch["input_ids"].ndim == 1:
        return batch | _inject({key: batch[key] for key in TOKEN_KEYS if key in batch}, turn, prefix)
    rows = [_inject(row, turn, prefix) for row in split_rows(batch)]
    return batch | pad_rows(rows, pad_id=pad_id_of(processor), side=padding_side(processor))


def _inject(row: Mapping[str, torch.Tensor], turn: torch.Tensor, prefix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Insert the prefix after every turn marker of one row without padding."""
    ids = row["input_ids"]
    if len(ids) < len(turn):
        return dict(row)
    places = (ids.unfold(0, len(turn), 1) == turn).all(dim=1).nonzero().flatten() + len(turn)
    fills = {"attention_mask": 1, "labels": IGNORE}
    pieces: dict[str, list[torch.Tensor]] = {key: [] for key in row}
    begin = 0
    for place in places.tolist():
        end = place + len(prefix)
        is_written = torch.equal(ids[place:end], prefix)
        for key, value in row.items():
            pieces[key].append(value[begin:place])
            written = prefix if key == "input_ids" else torch.full_like(prefix, fills.get(key, 0))
            pieces[key].append(value[place:end] if is_written and key != "labels" else written)
        begin = end if is_written else place
    return {key: torch.cat([*pieces[key], value[begin:]]) for key, value in row.items()}
