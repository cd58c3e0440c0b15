"""A board on a Ray cluster: a small actor, on which no batch depends.

It remembers which loader builds a batch and, for a while, where the finished one lies in the object store. A loader
that has claimed batches says again and again that it lives, however long it builds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from vlm_stream.dispatch.parcel import pack, unpack
from vlm_stream.dispatch.ray_cluster import CALLS, NAMESPACE, connect, session

if TYPE_CHECKING:
    from vlm_stream.build import Delivery
    from vlm_stream.dispatch.pool import Finished
    from vlm_stream.loader_options import RayBuilders

logger = logging.getLogger(__name__)

_SILENT_S: Final = 20.0
"""What was claimed by a loader that has said nothing for so long may be claimed again."""
_BEAT_S: Final = 2.0
"""How often a loader says that it lives, while it has claimed something."""
_LOOK_S: Final = 1.0
_KEPT_BYTES: Final = 256 << 20
_KEPT_S: Final = 120.0
_START_S: Final = 60.0
"""A board that was started a moment ago is waited for: builders start as long."""
_ANSWER_S: Final = 2.0
_AGAIN_S: Final = 10.0
"""A board that did not answer is left alone for so long."""


@dataclass(slots=True, eq=False)
class _Entry:
    claimant: str
    claimed_at: float = field(default_factory=time.monotonic)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)
    refs: list[Any] | None = None
    num_bytes: int = 0
    num_taken: int = 0


class BoardActor:
    """Who builds what; Ray makes an actor of it."""

    def __init__(self, peers: int | None) -> None:
        """Start empty; `peers` loaders want each batch, None: nobody knows how many."""
        self._others = None if peers is None else peers - 1
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._heard_at: dict[str, float] = {}

    async def claim(self, key: str, member: str) -> bool:
        """Tell whether the caller shall build a batch."""
        self._heard_at[member] = time.monotonic()
        await self._look_for_silence(key)
        if key in self._entries:
            return False
        self._entries[key] = _Entry(member)
        self._remove_old()
        return True

    async def beat(self, member: str) -> None:
        self._heard_at[member] = time.monotonic()

    async def leave(self, member: str) -> None:
        """Forget what a loader has claimed and not posted."""
        self._heard_at.pop(member, None)
        for key, entry in list(self._entries.items()):
            if entry.claimant == member and entry.refs is None:
                await self.release(key)

    async def post(self, key: str, member: str, refs: list[Any], num_bytes: int) -> None:
        """Say where a batch lies; the list keeps Ray from fetching it to here."""
        self._heard_at[member] = time.monotonic()
        entry = self._entries.setdefault(key, _Entry(member))
        entry.refs, entry.num_bytes = refs, num_bytes
        entry.is_over.set()
        self._remove_old()

    async def release(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            entry.is_over.set()

    async def wait(self, key: str) -> list[Any] | None:
        """Return where a batch lies once it was posted; None: it will not be."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        while not entry.is_over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(entry.is_over.wait(), _LOOK_S)
            await self._look_for_silence(key)
        entry.num_taken += 1
        if entry.num_taken == self._others:
            self._entries.pop(key, None)
        return entry.refs

    async def _look_for_silence(self, key: str) -> None:
        """Give the claims of a loader away that is silent over a batch: it may be dead."""
        entry = self._entries.get(key)
        if entry is None or entry.refs is not None:
            return
        if time.monotonic() - self._heard_at.get(entry.claimant, 0.0) > _SILENT_S:
            await self.leave(entry.claimant)

    def _remove_old(self) -> None:
        oldest = time.monotonic() - _KEPT_S
        kept = sum(entry.num_bytes for entry in self._entries.values())
        for key, entry in list(self._entries.items()):
            if entry.claimed_at > oldest and kept <= _KEPT_BYTES:
                return
            if entry.refs is not None or entry.claimed_at <= oldest:
                kept -= entry.num_bytes
                entry.is_over.set()
                del self._entries[key]


class RayBoard:
    """This loader's view of the board of its group."""

    def __init__(self, options: RayBuilders, group: str, peers: int | None) -> None:
        """Find the board, or start it."""
        self._ray = connect(options)
        self._session = session(self._ray)
        self._group, self._peers = group, peers
        self._member = uuid.uuid4().hex
        self._waits: dict[str, tuple[str, Any]] = {}
        self._away_until, self._answer_s = 0.0, _START_S
        self._actor: Any = None
        self._claims: set[str] = set()
        self._is_closed = threading.Event()
        self._find()
        self._thread = threading.Thread(target=self._beat, name="vlm-stream-board", daemon=True)
        self._thread.start()

    def claim(self, key: str) -> bool:
        """Tell whether this loader shall build it; without an answer it does."""
        is_mine = self._claim(key)
        if is_mine:
            self._claims.add(key)
        return is_mine

    def _beat(self) -> None:
        while not self._is_closed.wait(_BEAT_S) and self._is_connected():
            if self._claims:
                self._actor.beat.remote(self._member)

    def _is_connected(self) -> bool:
        return session(self._ray) == self._session

    def _claim(self, key: str) -> bool:
        if time.monotonic() < self._away_until or not self._is_connected():
            return True
        try:
            try:
                return self._ask(key)
            except self._ray.exceptions.ActorDiedError:  # a node may be lost at any moment: another board is made
                self._answer_s = _START_S
                self._find()
                return self._ask(key)
        except self._ray.exceptions.RayError as error:
            logger.warning("batches are not shared for now: their board does not answer (%s)", type(error).__name__)
            self._away_until = time.monotonic() + _AGAIN_S
            self._find()
            return True

    def _ask(self, key: str) -> bool:
        is_mine = bool(self._ray.get(self._actor.claim.remote(key, self._member), timeout=self._answer_s))
        self._answer_s = _ANSWER_S
        return is_mine

    def post(self, key: str, finished: Finished) -> None:
        """Say where a batch lies; one that was built by a process of this machine is put into the object store."""
        if not self._is_connected():
            return
        if finished.parcel is not None:
            ref = finished.parcel
        else:
            text, buffers = pack(finished.result)
            ref = self._ray.put(("done", 0, text, buffers))
        result: Any = finished.result
        self._claims.discard(key)
        self._actor.post.remote(key, self._member, [ref], result.num_bytes)

    def release(self, key: str) -> None:
        self._claims.discard(key)
        if self._is_connected():
            self._actor.release.remote(key)

    def look(self, key: str) -> Delivery | Literal["wait", "gone"]:
        """Ask the board, then the object store; each answers by a future."""
        if not self._is_connected():
            return "gone"
        stage, future = self._waits.get(key) or ("board", self._actor.wait.remote(key).future())
        self._waits[key] = stage, future
        if not future.done():
            return "wait"
        del self._waits[key]
        if future.exception() is not None or future.result() is None:
            return "gone"
        if stage == "board":
            self._waits[key] = "store", future.result()[0].future()
            return "wait"
        *_, text, buffers = future.result()
        delivery: Delivery = unpack(text, buffers, copies=True)
        return delivery

    def close(self) -> None:
        """Give claims back, and forget what was waited for; the board ends with whoever started it."""
        self._is_closed.set()
        self._thread.join()
        self._waits.clear()
        if self._is_connected():
            self._actor.leave.remote(self._member)

    def _find(self) -> None:
        """Find the board, or start it on this node: it ends with its starter, and should end with nobody else."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=True)
        name = {"name": f"board:{self._group}", "namespace": NAMESPACE, "get_if_exists": True}
        place = {"num_cpus": 0, "scheduling_strategy": here}
        board = self._ray.remote(BoardActor).options(**name, **place, max_concurrency=CALLS)
        self._actor = board.remote(self._peers)
