r"""Gemma-4's thinking prefix: the large instruction-tuned models open every answer with an empty thought.

Without it the first loss is that of a missing habit. `<|channel>thought\n<channel|>` is put after every
`<|turn>model\n`, visible to the model and IGNORE in the labels; where the template wrote the prefix itself, it is only
masked and never doubled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from vlm_stream.collate.default import collate_conversations, finish
from vlm_stream.collate.rows import pad_id_of, pad_rows, split_rows
from vlm_stream.encode import tokenizer_of
from vlm_stream.keys import IGNORE
from vlm_stream.keys import TOKEN_KEYS as SEQUENCE_KEYS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["GEMMA4_MODEL_TURN", "GEMMA4_THINKING_PREFIX", "gemma4_inject_thinking_prefix", "gemma4_prefix_collate_fn"]

GEMMA4_MODEL_TURN: Final = "<|turn>model\n"
GEMMA4_THINKING_PREFIX: Final = "<|channel>thought\n<channel|>"


def gemma4_prefix_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int | None = None
) -> dict[str, Any]:
    """Collate conversations for Gemma-4 with the thinking prefix before every answer.

    Raises:
        BadSampleError: When cutting to `max_length` would cut into media tokens.
    """
    examples, batch = collate_conversations(examples, processor)
    return finish(gemma4_inject_thinking_prefix(batch, processor), examples, processor, max_length)


def gemma4_inject_thinking_prefix(batch: dict[str, Any], processor: Any) -> dict[str, Any]:
    """Return the batch [B, S], or one sample [S], with the prefix inserted and masked."""
    turn, prefix = _encode(processor, GEMMA4_MODEL_TURN), _encode(processor, GEMMA4_THINKING_PREFIX)
    if not len(turn) or not len(prefix):
        return batch
    if batch["input_ids"].ndim == 1:
        return batch | _inject({k: batch[k] for k in SEQUENCE_KEYS if k in batch}, turn, prefix)
    rows = [_inject(row, turn, prefix) for row in split_rows(batch)]
    side = getattr(tokenizer_of(processor), "padding_side", "right")
    return batch | pad_rows(rows, pad_id=pad_id_of(processor), side=side)


def _encode(processor: Any, text: str) -> torch.Tensor:
    return torch.tensor(tokenizer_of(processor)(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)


def _inject(row: Mapping[str, torch.Tensor], turn: torch.Tensor, prefix: torch.Tensor) -> dict[str, torch.Tensor]:
    """Insert the prefix after every turn marker of one row without padding."""
    ids = row["input_ids"]
    if len(ids) < len(turn):
        return dict(row)
    places = (ids.unfold(0, len(turn), 1) == turn).all(dim=1).nonzero().flatten() + len(turn)
    pieces: dict[str, list[torch.Tensor]] = {key: [] for key in row}
    cursor = 0
    for place in places.tolist():
        end = place + len(prefix)
        is_written = torch.equal(ids[place:end], prefix)
        until = end if is_written else place
        for key, value in row.items():
            piece = value[cursor:until].clone()
            if is_written and key == "labels":
                piece[place - cursor :] = IGNORE
            pieces[key].append(piece)
            if not is_written:
                pieces[key].append(prefix if key == "input_ids" else torch.full_like(prefix, _filler(key)))
        cursor = until
    return {key: torch.cat([*pieces[key], value[cursor:]]) for key, value in row.items()}


def _filler(key: str) -> int:
    return {"attention_mask": 1, "labels": IGNORE}.get(key, 0)
