"""A whole data file, or one rank's share of it, as parsed examples in memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from vlm_stream.errors import BadSampleError
from vlm_stream.sources.data_file import DataFile
from vlm_stream.sources.parse import NotJsonError
from vlm_stream.sources.ratio import rank_share, sample_order

__all__ = ["load_json_or_jsonl", "load_jsonl_for_rank"]


def load_json_or_jsonl(file_path: str) -> list[Any]:
    """Return all examples of a JSON array or JSONL file; a broken one raises `BadSampleError` with `file:line`."""
    data = DataFile(str(file_path))
    return [_load(data, number) for number in range(len(data))]


def load_jsonl_for_rank(
    file_path: str, sample_ratio: float, rank: int | None, world_size: int | None
) -> tuple[list[Any], int]:
    """Return this rank's examples, and the number of records in the file; only the former are parsed."""
    data = DataFile(str(file_path))
    order = sample_order(len(data), sample_ratio)
    if rank is not None and world_size is not None and world_size > 1:
        order = rank_share(order, len(data), rank, world_size)
    numbers = np.arange(len(data)) if order is None else order
    return [_load(data, number) for number in numbers.tolist()], len(data)


def _load(data: DataFile, number: int) -> Any:
    try:
        return data.load(number)
    except NotJsonError as error:
        detail = f"{data.where(number)}: {error}, so the file cannot be loaded whole. Mend or delete the record."
        raise BadSampleError("convert", error.reason, detail) from None
