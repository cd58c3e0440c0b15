"""What takes the place of a bad sample or batch, and the note of it.

Enters: an index whose sample could not be used, or a batch that could not be collated. Leaves: others in their place.
The draw depends on the index (or on the texts and ids of the batch) and on the attempt alone, so any number of workers,
in any order, after any restart, draws the same; and each failure is a line in the ledger or the log. The stream uses
none of this: it records bad samples and leaves them out.
"""

import logging
import random
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from vlm_stream.encode import message_text
from vlm_stream.errors import BadSampleError, InputError
from vlm_stream.ledger import BadSample, Ledger
from vlm_stream.plan import Key, words

logger = logging.getLogger(__name__)


def replacement_index(index: int, attempt: int, count: int, *, seed: int = 0, purpose: str = "replace") -> int:
    """Return another index than `index` of `range(count)`; the same one for the same arguments, always."""
    if count < 2:
        return index
    word = words(Key(seed=seed, purpose=purpose, epoch=attempt, index=index), 1)[0]
    return (index + 1 + int(word) % (count - 1)) % count


class ReplacingDataset(Dataset[Any]):
    """A dataset that gives something else in place of what is bad.

    Attributes:
        max_retries: How many items are tried for one.
        ledger: What failed in this process.
    """

    def __init__(self, max_retries: int, seed: int, ledger_path: str | None) -> None:
        """Begin an empty ledger; every process appends to the file what failed, because a worker's own ends with it."""
        self.max_retries = max_retries
        self.ledger = Ledger()
        self._seed, self._ledger_path = seed, ledger_path

    def robust_collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a collate function so that a batch that fails is replaced by other items of this dataset."""
        return make_robust_collate(self, collate_fn, self.max_retries)

    def _fetch(self, load: Callable[[int], Any], index: int, count: int) -> Any:
        """Return `load(index)`, or that of another index if it fails; no other item mends an `InputError`."""
        place, error = index, None
        for attempt in range(self.max_retries):
            self.ledger.saw()
            try:
                return load(place)
            except InputError:
                raise
            except Exception as caught:  # datasets raise anything
                error = caught
                self._note(str(place), caught)
            place = replacement_index(index, attempt, count, seed=self._seed)
        raise RuntimeError(
            f"Failed to load a valid sample after {self.max_retries} retries for item {index} of "
            f"{type(self).__name__}; the last error was {error!r}. Mend the data: its ledger names what failed."
        ) from error

    def _note(self, sample: str, error: Exception) -> None:
        """Record one failure."""
        stage, reason = "read", type(error).__name__
        if isinstance(error, BadSampleError):
            stage, reason = error.stage, error.reason
        bad = BadSample(source=type(self).__name__, sample=sample, stage=stage, reason=reason, detail=str(error))
        logger.warning("%s", bad)
        if self._ledger_path is not None:
            with Path(self._ledger_path).open("a", encoding="utf-8") as lines:
                lines.write(bad.to_json() + "\n")
        self.ledger.add(bad)


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
