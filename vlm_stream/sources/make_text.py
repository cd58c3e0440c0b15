"""Text datasets for mixtures: Tulu-3, and Tulu-3 with Magicoder's problems."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from vlm_stream.errors import SourceError
from vlm_stream.sources.form import ShareGptForm
from vlm_stream.sources.hf_rows import Rows, interleave, load_rows
from vlm_stream.sources.hf_source import HFSource, MixedSource, text_item, turn
from vlm_stream.sources.sharegpt import convert_example

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["make_tulu3_dataset", "make_tulu3_magicoder_text_mix_dataset"]

_LOG = logging.getLogger(__name__)
_TULU = "allenai/tulu-3-sft-mixture"
_MAGICODER = "ise-uiuc/Magicoder-OSS-Instruct-75K"


def make_tulu3_dataset(
    path_or_dataset: Any = _TULU,
    split: str = "train",
    *,
    limit_dataset_samples: int | None = None,
    max_turns: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return instruction dialogues (column `messages`); those of more than `max_turns` messages are left out."""
    rows = load_rows(path_or_dataset, split, ("messages",), ignored=tuple(kwargs))
    if max_turns is not None:
        rows = _up_to_turns(rows, max_turns)
    if limit_dataset_samples is not None:
        rows = load_rows(rows, split, ("messages",), limit=limit_dataset_samples)
    return HFSource(rows, name="tulu3", convert=_tulu)


def make_tulu3_magicoder_text_mix_dataset(
    path_or_dataset: Any = _TULU,
    magicoder_path_or_dataset: Any = _MAGICODER,
    split: str = "train",
    *,
    probabilities: Sequence[float] = (0.8, 0.2),
    seed: int = 42,
    max_turns: int = 16,
    limit_total: int | None = None,
    **kwargs: Any,
) -> MixedSource:
    """Return Tulu-3 dialogues and Magicoder problems, drawn 80 to 20 until both were seen whole.

    Args:
        path_or_dataset: Tulu-3 (column `messages`).
        magicoder_path_or_dataset: Magicoder (columns `problem`, `solution`).
        split: Of both.
        probabilities: How often each is drawn.
        seed: Of the draw.
        max_turns: Dialogues of more messages are left out.
        limit_total: No more examples than this, both together.
        **kwargs: Options that mean nothing here; they are named in the log.
    """
    tulu = make_tulu3_dataset(path_or_dataset, split, max_turns=max_turns, **kwargs)
    code = HFSource(
        load_rows(magicoder_path_or_dataset, split, ("problem", "solution")), name="magicoder", convert=_magicoder
    )
    for source in (tulu, code):
        if not len(source):
            raise SourceError(f"'{source.name}' has no rows (left), so there is nothing to mix; leave it out.")
    if len(probabilities) != 2 or min(probabilities) <= 0 or abs(sum(probabilities) - 1) > 1e-6:
        raise SourceError(
            f"probabilities {tuple(probabilities)} are no mixture of two; give two above 0 that add up to 1."
        )
    order = interleave([len(tulu), len(code)], probabilities, seed)
    return MixedSource((tulu, code), order[:limit_total], name="tulu3_magicoder")


def _tulu(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    return convert_example({"messages": row["messages"]}, ShareGptForm(), "drop")


def _magicoder(row: Mapping[str, Any], _: int) -> dict[str, Any]:
    return {"conversation": [turn("user", text_item(row["problem"])), turn("assistant", text_item(row["solution"]))]}


def _up_to_turns(rows: Any, max_turns: int) -> Rows:
    """Return the rows with no more than so many messages; how many went is logged."""
    if hasattr(rows, "select_columns"):
        batches = rows.select_columns(["messages"]).with_format("arrow").iter(batch_size=10_000)
        lengths = np.concatenate([_list_lengths(batch["messages"]) for batch in batches] or [np.zeros(0, np.int64)])
    else:
        lengths = np.array([len(row["messages"] or ()) for row in rows], np.int64)
    kept = np.flatnonzero(lengths <= max_turns)
    if len(kept) < len(rows):
        _LOG.warning(
            "tulu3: %d of %d dialogues have more than %d turns and are left out.",
            len(rows) - len(kept), len(rows), max_turns,
        )  # fmt: skip
    selected: Rows = rows.select(kept) if hasattr(rows, "select") else [rows[i] for i in kept.tolist()]
    return selected


def _list_lengths(column: Any) -> Any:
    import pyarrow.compute as pc

    return pc.fill_null(pc.list_value_length(column), 0).to_numpy()
