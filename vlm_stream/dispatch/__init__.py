"""Dispatch: who builds which blueprint, and when.

Enters: blueprints in plan order. Leaves: deliveries in the same order. It must not know plans, samples or tensors.

`dispatcher.py` (threads, losses, errors) asks `schedule.py` (which batch next, by whom) with the estimates of
`costs.py`, and gives work to a pool (`pool.py`, the interface): `processes.py` with `worker.py` (the child's side).
`inline.py` builds without any of it, in this process.
"""

from __future__ import annotations

from vlm_stream.dispatch.dispatcher import Dispatcher, DispatchOptions
from vlm_stream.dispatch.inline import build_inline
from vlm_stream.dispatch.pool import Listener, Pool
from vlm_stream.dispatch.processes import ProcessPool

__all__ = ["DispatchOptions", "Dispatcher", "Listener", "Pool", "ProcessPool", "build_inline"]
