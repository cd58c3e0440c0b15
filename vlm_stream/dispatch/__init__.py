"""Dispatch: who builds which blueprint, and when.

Enters: blueprints in plan order. Leaves: deliveries in the same order. It must not know plans, samples or tensors.

`dispatcher.py` (threads, losses, errors) asks `schedule.py` (which batch next, by whom; `values.py` knows what is
urgent and what is late) with the estimates of `costs.py`, lets `team.py` start and end builders, and gives work to a
pool: `pool.py` is the interface, `processes.py` with `worker.py` (the child's side) one of them, `ray_pool.py` with
`ray_builder.py` (the actor's) another; `ray_cluster.py` knows the cluster and who there is, `ray_keeper.py` keeps named
pools. `shared.py` and `ray_board.py` let loaders that want the same batch build it once. `inline.py` builds without any
of it, in this process. While nothing comes, `watchdog.py` says what is waited for and where everybody is.
"""

from __future__ import annotations

from vlm_stream.dispatch.costs import CostModel
from vlm_stream.dispatch.dispatcher import Dispatcher
from vlm_stream.dispatch.inline import build_inline
from vlm_stream.dispatch.pool import Listener, Pool
from vlm_stream.dispatch.processes import ProcessPool
from vlm_stream.dispatch.ray_board import RayBoard
from vlm_stream.dispatch.ray_cluster import builder_names, connect, has_pool, no_pool_error
from vlm_stream.dispatch.ray_keeper import end_pool, start_keeper, statuses
from vlm_stream.dispatch.ray_pool import RayPool
from vlm_stream.dispatch.shared import Board, SharedPool, ShmBoard
from vlm_stream.dispatch.values import DISPATCH_COUNTS, DispatchOptions
from vlm_stream.dispatch.watchdog import all_stacks

__all__ = [
    "DISPATCH_COUNTS",
    "Board",
    "CostModel",
    "DispatchOptions",
    "Dispatcher",
    "Listener",
    "Pool",
    "ProcessPool",
    "RayBoard",
    "RayPool",
    "SharedPool",
    "ShmBoard",
    "all_stacks",
    "build_inline",
    "builder_names",
    "connect",
    "end_pool",
    "has_pool",
    "no_pool_error",
    "start_keeper",
    "statuses",
]
