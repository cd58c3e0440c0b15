"""Token rows with what a loss wants beside them, for reinforcement learning: NeMo Automodel's `Datum`.

Enters: sequences with targets, weights, log-probabilities, advantages. Leaves: one batch, padded `[B, T]` or packed
`[1, T]`. No media.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.nn.functional import pad

from vlm_stream.collate import align_up
from vlm_stream.keys import IGNORE

_TARGETS: Final = "target_tokens"


@dataclass
class Datum:
    """One sequence.

    Attributes:
        input_ids: `[T]` Its tokens.
        loss_fn_inputs: `target_tokens` `[T]`, shifted already; `weights` `[T]`, 0 where nothing is learned; anything
            else (`logprobs`, `advantages`), one number per token or one for the whole sequence.
    """

    input_ids: torch.Tensor
    loss_fn_inputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make tensors of what is given, and refuse what does not run along the tokens."""
        self.input_ids = torch.as_tensor(self.input_ids)
        if self.input_ids.dim() != 1:
            raise ValueError(
                f"Datum.input_ids must be 1-D [T], one sequence; got the shape {list(self.input_ids.shape)}"
            )
        self.loss_fn_inputs = {name: torch.as_tensor(value) for name, value in self.loss_fn_inputs.items()}
        for name, value in self.loss_fn_inputs.items():
            if value.numel() != self.seq_len and (value.numel() != 1 or name == _TARGETS):
                raise ValueError(
                    f"{name} has {value.numel()} numbers for {self.seq_len} tokens, so nobody knows which token each "
                    f"belongs to; give one per token" + ("" if name == _TARGETS else ", or one for the sequence")
                )

    @property
    def seq_len(self) -> int:
        """Tokens of the sequence."""
        return len(self.input_ids)

    def labels(self, ignore_index: int = IGNORE) -> torch.Tensor | None:
        """Return the targets `[T]`, ignored where their weight is 0; None without targets."""
        targets = self.loss_fn_inputs.get(_TARGETS)
        if targets is None:
            return None
        weights = self.loss_fn_inputs.get("weights", torch.ones(1))
        return targets.long().masked_fill(weights == 0, ignore_index)

    def to_features(self, *, ignore_index: int = IGNORE) -> dict[str, list[int]]:
        """Return tokens, a mask of ones and (with targets) labels as lists."""
        ids = self.input_ids.tolist()
        labels = self.labels(ignore_index)
        return {
            "input_ids": ids,
            "attention_mask": [1] * len(ids),
            **({} if labels is None else {"labels": labels.tolist()}),
        }


def collate_datums(
    datums: Sequence[Datum],
    *,
    packed: bool = False,
    pad_seq_len_divisible: int | None = None,
    ignore_index: int = IGNORE,
) -> dict[str, Any]:
    """Collate sequences.

    Args:
        datums: At least one; all with the same `loss_fn_inputs`.
        packed: One row of all tokens with the lengths of the sequences (THD), instead of a padded row for each.
        pad_seq_len_divisible: Pad rows to a multiple of it; packed rows have no padding.
        ignore_index: Label of what is not learned.

    Returns:
        Padded: `input_ids`, `attention_mask`, `padding_mask`, `labels` (with targets) `[B, T]`. Packed: `input_ids`,
        `labels`, `position_ids` `[1, T]`, `seq_lens`, `seq_lens_padded` `[1, sequences]`, `qkv_format`. Both: each
        other entry of `loss_fn_inputs` as float32, `[B, T]` or `[1, T]` where it has a number per token, otherwise
        `[sequences]`.

    Raises:
        ValueError: There is none, they differ in their entries, or a packed one is empty.
    """
    if not datums:
        raise ValueError("collate_datums requires at least one Datum, or there is no batch.")
    names = set(datums[0].loss_fn_inputs)
    for datum in datums:
        if set(datum.loss_fn_inputs) != names:
            raise ValueError(
                f"every Datum of a batch must carry the same loss_fn_inputs: one has {sorted(names)}, another "
                f"{sorted(datum.loss_fn_inputs)}. What is missing would be lost for the others too; fill it in."
            )
    join = _row if packed else _rows
    width = max(datum.seq_len for datum in datums)
    if pad_seq_len_divisible:
        width = align_up(width, pad_seq_len_divisible)
    ids = join([datum.input_ids.long() for datum in datums], width, 0)
    labels = [datum.labels(ignore_index) for datum in datums]
    told = [label for label in labels if label is not None]
    lengths = [datum.seq_len for datum in datums]
    if packed:
        if not all(lengths):
            raise ValueError("cannot pack an empty sequence: kernels take no document of 0 tokens; leave it out.")
        batch: dict[str, Any] = {
            "input_ids": ids,
            "labels": _row(told, width, ignore_index) if told else torch.full_like(ids, ignore_index),
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "seq_lens": torch.tensor([lengths]),
            "seq_lens_padded": torch.tensor([lengths]),
            "qkv_format": "thd",
        }
    else:
        mask = _rows([torch.ones(length, dtype=torch.int64) for length in lengths], width, 0)
        batch = {"input_ids": ids, "attention_mask": mask, "padding_mask": mask == 0}
        batch |= {"labels": _rows(told, width, ignore_index)} if told else {}
    for name in sorted(names - {_TARGETS}):
        values = [datum.loss_fn_inputs[name].float().flatten() for datum in datums]
        is_per_token = all(len(value) == length for value, length in zip(values, lengths, strict=True))
        if not is_per_token and any(len(value) != 1 for value in values):
            raise ValueError(
                f"{name} has a number per token in some Datums and one for the sequence in others, which no tensor "
                f"holds; give all of them the same form."
            )
        batch[name] = join(values, width, 0) if is_per_token else torch.cat(values)
    return batch


def _rows(values: Sequence[torch.Tensor], width: int, fill: int) -> torch.Tensor:
    return torch.stack([pad(value, (0, width - len(value)), value=fill) for value in values])


def _row(values: Sequence[torch.Tensor], width: int, fill: int) -> torch.Tensor:  # noqa: ARG001 - as _rows
    return torch.cat(list(values))[None]
