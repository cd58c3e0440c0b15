"""A data file as a source of records: conversations by number, in a chosen order.

Enters: a scanned file, the form of its examples, an order of record numbers. Leaves: `Record`s. A record that cannot be
parsed or mapped raises when it is read, with `file:line`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlm_stream.sources.form import ShareGptForm
from vlm_stream.sources.mismatch import MISMATCHES_KEY, Mismatch, OnMismatch, apply_policy, check_policy
from vlm_stream.sources.parse import NotJsonError
from vlm_stream.sources.record import Record
from vlm_stream.sources.sharegpt import PASSENGER_KEYS, map_sharegpt

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from vlm_stream.sources.data_file import DataFile

__all__ = ["Catalog", "example_to_record"]


class Catalog:
    """The records of one data file in a chosen order, as conversations."""

    def __init__(
        self,
        data: DataFile,
        *,
        name: str,
        form: ShareGptForm | None = None,
        on_mismatch: OnMismatch = "drop",
        order: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Read `data` through `form`.

        Args:
            data: The scanned file.
            name: What ledgers and shards call this source.
            form: How columns and roles are called; the sharegpt defaults if None.
            on_mismatch: What happens to a record that does not map whole.
            order: Record numbers of the file in the order of this source, with repeats; all of them once if None.
        """
        check_policy(on_mismatch)
        self.name = name
        self.data = data
        self.form = form or ShareGptForm()
        self.on_mismatch = on_mismatch
        self.order = order

    def __len__(self) -> int:
        """Return the number of records, bad ones included."""
        return len(self.data) if self.order is None else len(self.order)

    def origin(self, index: int) -> str:
        """Return `file:line` of a record, good or bad."""
        return self.data.where(self._number(index))

    def _number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of source '{self.name}', which has {len(self)}")
        return index if self.order is None else int(self.order[index])

    def read(self, index: int) -> Record:
        """Return one record; raise `BadSampleError` (under `raise`: `SourceError`) when it cannot be used."""
        number = self._number(index)
        origin = self.data.where(number)
        try:
            example = self.data.load(number)
        except NotJsonError as error:
            apply_policy([], [Mismatch(error.reason, str(error))], self.on_mismatch, origin)
            raise  # not reached: without a conversation every policy raises
        return example_to_record(
            example,
            form=self.form,
            on_mismatch=self.on_mismatch,
            source=self.name,
            number=number,
            origin=origin,
        )


def example_to_record(
    example: Any, *, form: ShareGptForm, on_mismatch: OnMismatch, source: str, number: int, origin: str
) -> Record:
    """Return the record of a parsed sharegpt example."""
    conversation, mismatches = map_sharegpt(example, form)
    kept = apply_policy(conversation, mismatches, on_mismatch, origin)
    extras = {key: example[key] for key in PASSENGER_KEYS if key in example}
    if kept:
        extras[MISMATCHES_KEY] = kept
    own_id = example.get("id")
    has_id = isinstance(own_id, (str, int)) and not isinstance(own_id, bool) and own_id != ""
    return Record(
        source=source,
        id=str(own_id) if has_id else str(number),
        origin=origin,
        conversation=conversation,
        media_root=form.media_dir,
        extras=extras,
    )
