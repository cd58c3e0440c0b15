"""Any HF dataset in the sharegpt form: messages with placeholders, and columns of media."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vlm_stream.sources.form import ShareGptForm
from vlm_stream.sources.hf_rows import load_rows
from vlm_stream.sources.hf_source import HFSource
from vlm_stream.sources.mismatch import OnMismatch, check_policy
from vlm_stream.sources.sharegpt import convert_example

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["make_sharegpt_dataset"]


def make_sharegpt_dataset(
    path_or_dataset: Any,
    split: str = "train",
    *,
    columns: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    on_mismatch: OnMismatch = "drop",
    limit_dataset_samples: int | None = None,
    **kwargs: Any,
) -> HFSource:
    """Return the dialogues of a dataset whose columns and roles are called as `columns` and `tags` say."""
    check_policy(on_mismatch)
    form = ShareGptForm.from_dicts(columns, tags)
    rows = load_rows(path_or_dataset, split, (form.messages,), limit=limit_dataset_samples, ignored=tuple(kwargs))
    return HFSource(rows, name="sharegpt", convert=partial(_convert, form=form, on_mismatch=on_mismatch))


def _convert(row: Mapping[str, Any], _: int, form: ShareGptForm, on_mismatch: OnMismatch) -> dict[str, Any]:
    return convert_example(dict(row), form, on_mismatch)
