"""Building in this process: batch after batch, while the bytes of the next ones are fetched."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from vlm_stream.build import Builder
from vlm_stream.dispatch.watchdog import InlineWatch

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from vlm_stream.blueprint import Planned
    from vlm_stream.build import BuildConfig, Delivery
    from vlm_stream.storage import Reading

_MAX_AHEAD = 8


def build_inline(
    plan: Iterator[Planned], config: BuildConfig, max_bytes: int
) -> Generator[tuple[Planned, Delivery], None, None]:
    """Yield each batch in plan order; at most `max_bytes` of later batches are fetched ahead, but always one batch."""
    begun: deque[tuple[Planned, Reading]] = deque()
    num_bytes, max_ahead = 0, 1  # the first batch does not wait for later ones to be planned
    with InlineWatch() as watch, Builder(config, watch) as builder:
        watch.plan()
        for planned in plan:
            begun.append((planned, builder.begin(planned.blueprint)))
            num_bytes += planned.blueprint.work.num_bytes
            while len(begun) > 1 and (num_bytes > max_bytes or len(begun) > max_ahead):
                max_ahead = min(2 * max_ahead, _MAX_AHEAD)
                num_bytes -= begun[0][0].blueprint.work.num_bytes
                yield _finish(builder, watch, *begun.popleft())
            watch.plan()
        while begun:
            yield _finish(builder, watch, *begun.popleft())


def _finish(builder: Builder, watch: InlineWatch, planned: Planned, reading: Reading) -> tuple[Planned, Delivery]:
    watch.build(planned.blueprint.name)
    delivery = builder.finish(planned.blueprint, reading)
    watch.rest()
    return planned, delivery
