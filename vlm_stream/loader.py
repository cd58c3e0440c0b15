"""`StreamLoader`: ready batches for a trainer, and the state of what the trainer has consumed.

It runs a `VLMStream` in worker processes and keeps, for each batch that it hands out, the cursor behind it. So the
state never counts what workers prefetched, and it is the same on every rank: a few kilobytes of JSON that fit any
number of ranks and workers.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from vlm_stream.errors import StateError
from vlm_stream.ledger import Ledger
from vlm_stream.stream import StreamOptions, VLMStream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.stream import Delivery, Sources

__all__ = ["StreamLoader"]


class StreamLoader:
    """Iterate over ready batches; save and load the position.

    >>> loader = StreamLoader("shards/", processor=processor, pack_size=4096, num_workers=2)  # doctest: +SKIP
    >>> for batch in loader:                                                                 # doctest: +SKIP
    ...     loss = model(**batch, use_cache=False).loss

    The keyword arguments are those of `StreamOptions`, plus:

    Args:
        sources: A path or URL, a list of them, or `{name: {"url": ..., "weight": ..., "sample_ratio": ...}}`.
        processor: A transformers processor, or the name or path of one.
        num_workers: Processes that read and encode; 0 does it in this one.
        prefetch_batches: Batches that each worker keeps ready.
        rank: Data-parallel rank; by default torch.distributed's, or 0.
        world_size: Number of data-parallel ranks; by default torch.distributed's, or 1.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        processor: Any,
        num_workers: int = 0,
        prefetch_batches: int = 2,
        rank: int | None = None,
        world_size: int | None = None,
        **options: Any,
    ) -> None:
        """Keep the settings; nothing is opened before iteration starts."""
        self.stream = VLMStream(
            sources, processor=processor, options=StreamOptions.parse(options), rank=rank, world_size=world_size
        )
        self.num_workers = num_workers
        self.prefetch_batches = prefetch_batches
        self.ledger = Ledger(max_rate=self.stream.options.bad_budget)
        self._state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches from the current position to the end of the epoch (or for ever)."""
        self.stream.start_at(self._state)
        for delivery in self._deliveries():
            self._state = delivery.state
            self.ledger.saw(delivery.num_samples)
            self.ledger.extend(delivery.bad)
            yield delivery.batch
        self._state = None  # the next iteration starts anew

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch handed out, as JSON values."""
        return {"vlm_stream": copy.deepcopy(self._state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch after which `state_dict` was called, with any number of ranks and workers."""
        if not isinstance(state, dict) or "vlm_stream" not in state:
            raise StateError(
                "this is not the state of a StreamLoader (it has no 'vlm_stream' entry), so there is no position to go "
                "on from; pass what loader.state_dict() returned, unwrapped from your checkpoint"
            )
        self._state = json.loads(json.dumps(state["vlm_stream"]))

    def _deliveries(self) -> Iterator[Delivery]:
        if not self.num_workers:
            return self.stream.deliveries()
        from torch.utils.data import DataLoader

        loader: DataLoader[Delivery] = DataLoader(
            self.stream.as_deliveries(),
            batch_size=None,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch_batches,
        )
        return iter(loader)
