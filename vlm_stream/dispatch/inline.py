"""Building in this process: batch after batch, while the bytes of the next ones are fetched."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from vlm_stream.build import Builder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.blueprint import Planned
    from vlm_stream.build import BuildConfig, Delivery
    from vlm_stream.storage import Reading

__all__ = ["build_inline"]

_MAX_AHEAD = 8


def build_inline(plan: Iterator[Planned], config: BuildConfig, max_bytes: int) -> Iterator[tuple[Planned, Delivery]]:
    """Yield each batch in plan order; at most `max_bytes` of later batches are fetched ahead, but always one batch."""
    begun: deque[tuple[Planned, Reading]] = deque()
    num_bytes, max_ahead = 0, 1  # the first batch does not wait for later ones to be planned
    with Builder(config) as builder:
        for planned in plan:
            begun.append((planned, builder.begin(planned.blueprint)))
            num_bytes += planned.blueprint.work.num_bytes
            while len(begun) > 1 and (num_bytes > max_bytes or len(begun) > max_ahead):
                max_ahead = min(2 * max_ahead, _MAX_AHEAD)
                num_bytes -= begun[0][0].blueprint.work.num_bytes
                yield _finish(builder, *begun.popleft())
        while begun:
            yield _finish(builder, *begun.popleft())


def _finish(builder: Builder, planned: Planned, reading: Reading) -> tuple[Planned, Delivery]:
    return planned, builder.finish(planned.blueprint, reading)
