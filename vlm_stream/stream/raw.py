"""Batches without a processor: the samples' own bytes, for people who encode in a way of their own.

The plan, the order, the state and the ledger are those of any other run; only encoding and collation are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import ConfigError
from vlm_stream.format import FieldMap, is_text_member, to_conversation
from vlm_stream.stream.collators import CustomCollator

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vlm_stream.errors import BadSampleError
    from vlm_stream.stream.options import StreamOptions

__all__ = ["RawRows", "RawSample"]


@dataclass(slots=True)  # not frozen, which would take three times as long; and no tuple, which torch takes apart
class RawSample:
    """One sample as it lies in its shard, its checksum seen to be right."""

    source: str
    shard: str
    key: str
    members: Mapping[str, bytes | memoryview]
    """Names (`json`, `0.jpg`) with their bytes; views of what was fetched, until the sample leaves its process."""
    fields: FieldMap

    def conversation(self) -> list[dict[str, Any]]:
        """Return its messages, in which media stand as member names."""
        texts = {name: bytes(content) for name, content in self.members.items() if is_text_member(name)}
        return to_conversation(self.fields, list(self.members), texts)

    def __reduce__(self) -> tuple[Any, ...]:
        members = {name: bytes(content) for name, content in self.members.items()}
        return RawSample, (self.source, self.shard, self.key, members, self.fields)


class RawRows:
    """Joins samples as they are: `{"samples": rows}`, or what the user's `collate_fn` makes of the rows.

    A packed row is a list of samples, any other row a sample; what is bad is left out.
    """

    def __init__(self, options: StreamOptions) -> None:
        """Refuse options that only an encoded batch can have."""
        needs = [name for name in ("fake_image", "pp_microbatches") if getattr(options, name)]
        needs += ["pixels"] * (options.pixels not in ("full", True))
        if needs:
            raise ConfigError(
                f"without a processor batches are bytes, so {' and '.join(needs)} cannot be honoured; "
                f"name a processor, or leave {'it' if len(needs) == 1 else 'them'} out"
            )
        capacity = options.pack_size if options.mode == "packed" else None
        self._collator = CustomCollator(options.collate_fn or _as_they_are, None, capacity)
        self.with_refs = options.with_refs
        self.pixels = True

    def encode(self, members: Mapping[str, memoryview], fields: FieldMap, name: tuple[str, str, str]) -> RawSample:
        """Return the sample as it is."""
        return RawSample(*name, members, fields)

    def collate(
        self, rows: Sequence[Sequence[RawSample]]
    ) -> tuple[dict[str, Any], list[tuple[int, int, BadSampleError]]]:
        """Join rows into a batch; all of them fit."""
        return self._collator(rows), []


def _as_they_are(rows: Sequence[Any], _processor: Any) -> dict[str, Any]:
    return {"samples": list(rows)}
