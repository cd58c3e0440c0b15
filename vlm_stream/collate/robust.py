"""A collate function that survives bad batches: the whole batch is drawn again, the same way every time.

Enters: a dataset and a collate function. Leaves: a function that on failure takes other examples. The draw depends on
the batch's own texts and ids and on the attempt alone: not on workers, on earlier batches or on a global generator. The
stream does not use this (it records bad samples instead); it is for map-style datasets.
"""

from __future__ import annotations

import logging
import random
import zlib
from typing import TYPE_CHECKING, Any

import torch

from vlm_stream.encode import message_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["make_robust_collate"]

logger = logging.getLogger(__name__)


def make_robust_collate(
    dataset: Any, collate_fn: Callable[[Sequence[Any]], Any], max_retries: int = 10
) -> Callable[[Sequence[Any]], Any]:
    """Wrap a collate function so that a batch that fails is replaced by other examples of the dataset.

    Args:
        dataset: Where the replacements come from (`len` and item access).
        collate_fn: What is called with the batch.
        max_retries: How often it may fail.

    Returns:
        The wrapped function; it raises RuntimeError, with the last error as its cause, when the retries are used up.
    """

    def robust(batch: Sequence[Any]) -> Any:
        error: Exception | None = None
        seed = _fingerprint(batch)
        for attempt in range(max_retries):
            try:
                return collate_fn(batch)
            except Exception as caught:
                error = caught
                rng = random.Random(f"{seed}:{attempt}")
                places = [rng.randrange(len(dataset)) for _ in batch]
                logger.warning(
                    "A batch of %d failed to collate (%r); it is replaced by the examples %s.",
                    len(batch),
                    caught,
                    places,
                )
                batch = [dataset[place] for place in places]
        raise RuntimeError(f"Collate failed after {max_retries} retries: {error!r}") from error

    return robust


def _fingerprint(batch: Sequence[Any]) -> int:
    return zlib.crc32("\1".join(map(_identity, batch)).encode())


def _identity(example: Any) -> str:
    """Return what tells an example from others: its texts, its ids, or those of the samples that are packed in it."""
    if isinstance(example, (list, tuple)):
        return "\2".join(map(_identity, example))
    if not isinstance(example, dict):
        return repr(type(example))
    conversation, ids = example.get("conversation"), example.get("input_ids")
    texts = [message_text(message) for message in conversation] if conversation else []
    return "\0".join([*texts, "" if ids is None else str(torch.as_tensor(ids).tolist())])
