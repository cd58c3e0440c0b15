"""Builders on a Ray cluster: actors of this run, or those of a named pool that several runs use.

Enters: a build config and blueprints. Leaves: deliveries, read in place from Ray's object store, or from the memory of
builders of this machine. Ray places actors, moves their results and tells of their deaths; nothing else is asked of it.
An actor is lost when its process, its machine, the network or a result is: the dispatcher then gives its blueprints to
others. Ray's own threads only put what happened into a queue; one thread of ours reports it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import queue
import threading
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.blocks import BlockReader, look_into
from vlm_stream.dispatch.parcel import unpack
from vlm_stream.dispatch.pool import Failure, Finished, Joined, Lost
from vlm_stream.dispatch.processes import ProcessPool, for_processes
from vlm_stream.dispatch.ray_cluster import Guests, connect, say_error, session, start_builder
from vlm_stream.errors import ConfigError, WorkerError, hide_secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vlm_stream.blueprint import Blueprint, SampleRef
    from vlm_stream.build import BuildConfig
    from vlm_stream.dispatch.pool import Event, Kind, Listener
    from vlm_stream.dispatch.ray_builder import Place
    from vlm_stream.loader_options import RayBuilders

logger = logging.getLogger(__name__)

_FIRST_DELAY_S: Final = 0.5
_MAX_DELAY_S: Final = 30.0
"""A builder whose predecessors could not start waits before it is tried."""
_LOOK_S: Final = 2.0
"""How often it is looked whether this process is still in the cluster."""
_JOIN_S: Final = 5.0
_LEFT: Final = "is out of reach (this process has left the cluster)"
_ALONE: Final = (
    "this process has left the Ray cluster (ray.shutdown() was called in it), so nobody is left to build and the run "
    "ends here; its state is good. Keep Ray connected while batches are taken, or have a reserve here (local=1)."
)


@dataclass(slots=True, eq=False)
class _Remote:
    """An actor, as this run sees it."""

    actor: Any
    name: str = ""
    """In a named pool."""
    place: Place | None = None
    """None: it is not ready yet."""
    blocks: BlockReader | None = None
    """Where it is on this machine and builds for nobody else; others' batches lie in the object store."""
    tickets: dict[int, int] = field(default_factory=dict)
    """Of the batches that it has, by number."""

    def close_blocks(self) -> None:
        if self.blocks is not None:
            self.blocks.close()

    @property
    def is_guest(self) -> bool:
        return bool(self.name)

    @property
    def kind(self) -> Kind:
        return "guest" if self.is_guest else "usual"


class RayPool:
    """Builders that are actors, with processes of this machine in reserve."""

    def __init__(
        self,
        config: BuildConfig,
        listener: Listener,
        options: RayBuilders,
        *,
        is_shared: bool = False,
        num_ranks: int = 1,
    ) -> None:
        """Connect; builders are asked for by `grow`, or come from the named pool.

        Where others may read the same results (`is_shared`), this loader copies, so that its trainer may write. The
        ranks of a run have its share of a named pool together.

        Raises:
            ConfigError: There is no such cluster or pool, or the config cannot be sent.
        """
        self._ray = connect(options)
        self._session = session(self._ray)
        self._options, self._is_shared = options, is_shared
        self._listener = listener
        self._run, self._share = uuid.uuid4().hex, options.share / num_ranks
        self._key = config.digest(with_reading=True) or self._run
        self._numbers, self._tickets = itertools.count(), itertools.count()
        self._remotes: dict[int, _Remote] = {}
        self._cancelled: set[int] = set()
        """Builders that were let go before they were asked for."""
        self._num_failed_starts = 0
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        try:
            from ray import cloudpickle

            pickled = cloudpickle.dumps(config)  # type: ignore[no-untyped-call]
            self._config = self._ray.put(pickled)  # once, for all builders
        except Exception as error:  # a class may fail in any way when it is taken apart
            raise ConfigError(
                f"processor, collate_fn and options cannot be sent to builders on Ray ({type(error).__name__}: "
                f"{error}); give the processor by its name, and a collate_fn that holds nothing of this process"
            ) from error
        self._reserves: set[int] = set()
        self._local: ProcessPool | None = None
        if options.local:
            self._local = ProcessPool(for_processes(config, pickled), self._on_local_event, numbers=self._numbers)
        self._nodes: tuple[str, ...] = ()
        self.nearness: Callable[[int, Blueprint], float] | None = (
            self._nearness if config.options.cache_dir is not None else None
        )
        pool = options.pool
        self._guests = None if pool is None else Guests(self._ray, pool, self._find_guest, self._is_connected)
        self._thread = threading.Thread(target=self._run_inbox, name="vlm-stream-ray", daemon=True)
        self._thread.start()

    # What a dispatcher asks -------------------------------------------------------------------------------------------

    def grow(self, *, is_reserve: bool = False) -> int:
        if is_reserve and self._local is not None:
            number = self._local.grow(is_reserve=True)
            self._reserves.add(number)
            return number
        number = next(self._numbers)
        delay = min(_FIRST_DELAY_S * 2**self._num_failed_starts, _MAX_DELAY_S) if self._num_failed_starts else 0.0
        timer = threading.Timer(delay, self._inbox.put, (functools.partial(self._start, number),))
        timer.daemon = True
        timer.start()
        return number

    def give(self, builder: int, number: int, blueprint: Blueprint, skipped: Mapping[SampleRef, str]) -> None:
        if self._local is not None and builder in self._reserves:
            self._local.give(builder, number, blueprint, skipped)
        elif (remote := self._remotes.get(builder)) is not None:
            is_help = any(number in each.tickets for each in list(self._remotes.values()))
            ticket = remote.tickets[number] = next(self._tickets)
            more = is_help, None if remote.blocks is None else remote.blocks.to_return()
            ref = self._ask(builder, "build", self._run, ticket, blueprint, dict(skipped), *more)
            self._when_done(ref, functools.partial(self._on_built, builder, number, ref))

    def drop(self, builder: int, number: int) -> None:
        if self._local is not None and builder in self._reserves:
            self._local.drop(builder, number)
        elif (remote := self._remotes.get(builder)) is not None and number in remote.tickets:
            self._ask(builder, "drop", self._run, remote.tickets.pop(number))

    def stop(self, builder: int, why: str = "") -> None:
        """End a builder; one of a named pool is left to others, unless it is this run's batch that it hangs in."""
        if self._local is not None and builder in self._reserves:
            self._local.stop(builder, why)
        elif (remote := self._remotes.get(builder)) is not None:
            if not remote.is_guest:
                self._kill(remote)
            elif why:
                for ticket in list(remote.tickets.values()):  # others build them now
                    self._ask(builder, "drop", self._run, ticket)
                self._ask(builder, "end_if_stuck", self._run)
            self._inbox.put(functools.partial(self._lose, builder, why or "was let go"))
        else:
            self._cancelled.add(builder)

    def suspended(self) -> list[int]:
        """Return those of the reserve: actors may be on other machines."""
        return [] if self._local is None else self._local.suspended()

    def pids(self) -> list[int]:
        """Return the process ids of the reserve: actors may be on other machines."""
        return [] if self._local is None else self._local.pids()

    def close(self) -> None:
        self._is_closed.set()
        self._inbox.put(None)
        if self._guests is not None:
            self._guests.close()
        remotes = dict(self._remotes)
        for builder, remote in remotes.items():
            if remote.is_guest:
                self._ask(builder, "close", self._run)
            else:
                self._kill(remote)
        self._remotes.clear()
        if self._local is not None:
            self._local.close()
        self._thread.join(_JOIN_S)
        for remote in remotes.values():
            remote.close_blocks()
        if self._guests is not None:
            self._guests.join()

    # What is asked of actors: an error of it costs a builder at most --------------------------------------------------

    def _is_connected(self) -> bool:
        return session(self._ray) == self._session

    def _ask(self, builder: int, method: str, *arguments: Any) -> Any:
        """Return the promise of an answer; None where a builder cannot be asked, which is lost then."""
        remote = self._remotes.get(builder)
        if remote is None:
            return None
        try:
            if self._is_connected():
                return getattr(remote.actor, method).remote(*arguments)
            how = _LEFT
        except Exception as error:
            how = f"cannot be asked ({say_error(error)})"
        self._inbox.put(functools.partial(self._lose, builder, how))
        return None

    def _kill(self, remote: _Remote) -> None:
        """End an actor; one of a named pool is started again by Ray."""
        with contextlib.suppress(Exception):
            if self._is_connected():
                self._ray.kill(remote.actor, no_restart=not remote.is_guest)

    # What happens, in the thread of the inbox -------------------------------------------------------------------------

    def _when_done(self, ref: Any, then: Callable[[Any], None]) -> None:
        """Call `then` with the finished future of a result, in our thread: one of Ray's must not wait."""
        if ref is not None:
            ref.future().add_done_callback(lambda future: self._inbox.put(lambda: then(future)))

    def _run_inbox(self) -> None:
        is_connected = True
        while True:
            try:
                action = self._inbox.get(timeout=_LOOK_S)
            except queue.Empty:
                action = _nothing
            if action is None:
                return
            try:
                if is_connected and not self._is_connected():
                    is_connected = False
                    self._leave()
                action()
            except Exception as error:
                logger.exception("an event of a builder on Ray could not be handled")
                self._report(Finished(-1, None, Failure(error, str(error)), 0))

    def _leave(self) -> None:
        """Give up all that is elsewhere: this process has left the cluster, and its objects there are gone."""
        for builder in list(self._remotes):
            self._lose(builder, _LEFT)
        if self._local is None:
            self._report(Finished(-1, None, Failure(WorkerError(_ALONE), _ALONE), 0))

    def _report(self, event: Any) -> None:
        if not self._is_closed.is_set():
            self._listener(event)

    def _on_local_event(self, event: Event) -> None:
        """Report what a process in reserve says; where others build, one that cannot begin is no reason to end."""
        others = self._options.count or self._options.max_count or self._options.pool
        if isinstance(event, Finished) and isinstance(event.result, Failure) and event.number is None and others:
            logger.warning(
                "a process in reserve cannot begin, so builders on Ray that are lost or late have no help from here; "
                "local=0 asks for none. Its error: %s",
                event.result.text.strip(),
            )
        else:
            self._report(event)

    def _start(self, number: int) -> None:
        if self._is_closed.is_set() or number in self._cancelled:
            self._cancelled.discard(number)
        elif self._is_connected():
            self._open(number, _Remote(start_builder(self._ray, self._options)))

    def _find_guest(self, name: str, actor: Any) -> None:
        self._inbox.put(functools.partial(self._open, next(self._numbers), _Remote(actor, name)))

    def _open(self, number: int, remote: _Remote) -> None:
        self._remotes[number] = remote
        opened = self._ask(number, "open", self._run, self._key, self._config, self._share)
        self._when_done(opened, functools.partial(self._on_opened, number))

    def _on_opened(self, number: int, future: Any) -> None:
        remote = self._remotes.get(number)
        if remote is None:
            return
        error = future.exception()
        if error is not None and self._is_program_error(error):
            self._report(Finished(number, None, _failure(error), 0))
            return
        if error is not None:
            self._num_failed_starts += 1
            self._lose(number, f"could not start ({say_error(error)})")
            return
        self._num_failed_starts = 0
        remote.place = future.result()
        if not (remote.is_guest or self._is_shared):
            remote.blocks = look_into(remote.place.pid, remote.place.realm)
        self._note_nodes()
        self._when_done(self._ask(number, "wait", self._run), functools.partial(self._on_gone, number))
        self._report(Joined(number, remote.kind, remote.place.address))

    def _on_built(self, builder: int, number: int, ref: Any, future: Any) -> None:
        """Report an answer; that to a batch which was dropped is None."""
        if builder not in self._remotes:
            return
        error = future.exception()
        if error is not None and self._is_program_error(error):
            self._report(Finished(builder, number, _failure(error), 0))
        elif error is not None:
            self._lose(builder, f"is gone ({say_error(error)})")
        elif (answer := future.result()) is not None:
            self._remotes[builder].tickets.pop(number, None)
            if answer[0] == "failed":
                self._report(Finished(builder, number, answer[1], 0))
            elif answer[0] == "unknown":  # it was started again, or this run wanted nothing for long
                self._lose(builder, "does not know this run any more")
            else:
                _, resident, text, buffers = answer
                try:
                    delivery = unpack(text, buffers, copies=self._is_shared)
                except OSError as error:
                    self._lose(builder, f"is gone with a batch that was to be read ({error})")
                    return
                self._report(Finished(builder, number, delivery, resident, ref))

    def _on_gone(self, builder: int, future: Any) -> None:
        """Note a loss; an answer without an error is of a builder that lives and has forgotten this run."""
        if (error := future.exception()) is not None:
            self._lose(builder, f"is gone ({say_error(error)})")

    def _lose(self, builder: int, how: str) -> None:
        remote = self._remotes.pop(builder, None)
        if remote is None:
            return
        remote.close_blocks()
        self._note_nodes()
        if self._guests is not None:
            self._guests.lose(remote.name)
        if not remote.is_guest:
            self._kill(remote)  # it may only be out of reach
        if not remote.is_guest or remote.place is not None:
            self._report(Lost(builder, how, None, None, remote.kind, is_remote=True))

    def _is_program_error(self, error: BaseException) -> bool:
        return not isinstance(error, self._ray.exceptions.RayError) or isinstance(
            error, self._ray.exceptions.RayTaskError
        )

    # Where shards are cached ------------------------------------------------------------------------------------------

    def _note_nodes(self) -> None:
        places = [remote.place for remote in list(self._remotes.values()) if remote.place is not None]
        self._nodes = tuple(sorted({place.node for place in places}))

    def _nearness(self, builder: int, blueprint: Blueprint) -> float:
        """Return the share of a batch's bytes whose shards belong to the builder's machine.

        A shard belongs to the machine with the highest hash of both: every rank finds the same one without a table,
        and when a machine goes only its shards move.
        """
        remote = self._remotes.get(builder)
        if remote is None or remote.place is None or len(self._nodes) < 2:
            return 0.0
        near = total = 0
        for row in blueprint.rows:
            for piece in row:
                total += piece.span.size
                near += piece.span.size * (owner_of(piece.span.path, self._nodes) == remote.place.node)
        return near / max(total, 1)


@functools.lru_cache(maxsize=1 << 16)
def owner_of(shard: str, nodes: tuple[str, ...]) -> str:
    """Return the machine that a shard belongs to (rendezvous hashing)."""
    return max(nodes, key=lambda node: hashlib.blake2b(f"{node} {shard}".encode(), digest_size=8).digest())


def _nothing() -> None:
    """Do nothing."""


def _failure(error: BaseException) -> Failure:
    cause = getattr(error, "cause", None)
    return Failure(cause if isinstance(cause, Exception) else None, hide_secrets(str(error)))
