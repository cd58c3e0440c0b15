"""Our own loop: what each rank should have been given, from loaders with explicit ranks in this process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import DatasetError
from vlm_stream.testing.conformance.record import digests

if TYPE_CHECKING:
    from vlm_stream.loader import StreamLoader
    from vlm_stream.testing.conformance.records import Keys
    from vlm_stream.testing.conformance.run import Run

__all__ = ["Expected", "Given", "evaluate", "first_gradients", "own_loop", "state_after"]

Name = tuple[str, str, str]
"""Of a sample: source, shard, key."""


@dataclass(frozen=True, slots=True)
class Given:
    """A batch as our own loop gets it."""

    keys: Keys
    samples: tuple[Name, ...]
    """None of them: it only fills the last step."""


Expected = list[list[Given]]
"""Batches by rank."""


def own_loop(run: Run, world: int, state: dict[str, Any] | None = None) -> Expected:
    """Return the batches of each rank to the end of the epoch, from the start or from a state."""
    ranks = []
    for rank in range(world):
        with _open(run, rank, world) as loader:
            if state is not None:
                loader.load_state_dict(state)
            ranks.append([_given(batch) for batch in loader])
    return ranks


def state_after(run: Run, world: int, num_batches: int) -> dict[str, Any]:
    """Return the state behind so many batches of each rank."""
    with _open(run, 0, world) as loader:
        for _ in itertools.islice(loader, num_batches):
            pass
        return loader.state_dict()


def evaluate(run: Run, world: int) -> Expected:
    """Return the batches of one evaluation, by rank."""
    ranks = []
    for rank in range(world):
        with run.eval_loader(rank=rank, world_size=world, with_refs=True, num_workers=0) as loader:
            ranks.append([_given(batch) for batch in loader])
    return ranks


def first_gradients(run: Run, want: Expected) -> dict[str, Any]:
    """Return the gradients of the first step of our own loop, computed from one big batch of the same rows.

    Its loss is the model's own mean over all labels: no accumulation, no ranks, no label counts. In float64, so that
    what differs is the trainer's.
    """
    from vlm_stream.testing.models import build_tiny_model

    rows = len(want) * run.accumulation
    with _open(run, 0, 1, micro_batches=1, batch_size=rows) as loader:
        batch = dict(next(iter(loader)))
    own = {name for rank in want for given in rank[: run.accumulation] for name in given.samples}
    if {tuple(name) for row in batch.pop("refs") for name in row} != own:
        raise DatasetError(
            "the first step of the ranks and one batch of the same size hold different samples, so their gradients "
            "cannot be compared; leave `barrier`, `horizon` and the like as they are in `Run.options`"
        )
    batch.pop("num_items_in_batch", None)
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    model = build_tiny_model("qwen2_5_vl", run.processor()).double()
    model(**batch, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _open(run: Run, rank: int, world: int, **changes: Any) -> StreamLoader:
    return run.loader(rank=rank, world_size=world, with_refs=True, num_workers=0, **changes)


def _given(batch: dict[str, Any]) -> Given:
    names = [tuple(name) for row in batch["refs"] for name in row]
    return Given(digests({key: value for key, value in batch.items() if key != "refs"}), tuple(names))
