"""The viewer: everything that pages are made of, opened once.

Enters: sources, options, maybe a processor, a state, a running loader. Leaves: a catalog of samples, a reader of single
ones, plans by their settings; and what was drawn, kept within a bound of memory.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.plan import read_state
from vlm_stream.planning import open_plan
from vlm_stream.state import RunState
from vlm_stream.view.catalog import Catalog
from vlm_stream.view.facts import Overview
from vlm_stream.view.runs import Watched, run_view
from vlm_stream.view.sample import SampleReader
from vlm_stream.view.steps import PlanBook, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from vlm_stream.options import StreamOptions
    from vlm_stream.plan import Ref
    from vlm_stream.planning import Plan
    from vlm_stream.recipe import SourceOptions
    from vlm_stream.view.runs import LoaderLike, RunView

_MAX_KEPT: Final = 96 << 20
"""Bytes of pictures."""
_PATIENCE_S: Final = 0.2
_AGAIN_S: Final = 30.0
"""How long somebody waits who asks again."""
_GUEST_SHARE: Final = 0.1
"""Of a core, for threads in a trainer's process."""
_MAX_REST: Final = 1.0
"""Seconds."""
_QUIET_S: Final = 0.15
"""How long nothing is asked for before a view has all of its pictures, as far as anybody can tell."""


class Pace:
    """When threads in the background work: not while a page or its pictures are made, and for no more than a share."""

    def __init__(self, share: float = 1.0) -> None:
        """Begin without pages."""
        self.share = share
        self.is_closed = False
        """Whether they are to end."""
        self._num_pages = 0
        self._left = -_QUIET_S
        """When the last page was done."""
        self._changed = threading.Condition()

    @contextmanager
    def page(self) -> Iterator[None]:
        """Make a page: threads in the background wait for its end."""
        with self._changed:
            self._num_pages += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_pages -= 1
                self._left = time.monotonic()
                self._changed.notify_all()

    def rest(self, worked_since: float) -> float:
        """Wait after some work, never for long; return the time."""
        if self.share < 1:
            time.sleep(min((time.monotonic() - worked_since) * (1 / self.share - 1), _MAX_REST))
        until = time.monotonic() + _MAX_REST
        with self._changed:
            while (now := time.monotonic()) < until:
                quiet = self._left + _QUIET_S
                if not self._num_pages and now >= quiet:
                    break
                self._changed.wait(until - now if self._num_pages else min(quiet, until) - now)
        return time.monotonic()


class Viewer:
    """What pages are made of; may be used by several threads."""

    def __init__(
        self,
        sources: Sequence[SourceOptions],
        options: StreamOptions,
        processor: Any = None,
        *,
        world: int = 1,
        plan: Plan | None = None,
        run: Watched | None = None,
    ) -> None:
        """Open the datasets, or take those of a plan.

        Args:
            sources: The datasets.
            options: How samples become batches.
            processor: Counts and encodes; None: the index alone counts.
            world: Data-parallel ranks.
            plan: Opened already.
            run: The run that is looked at.
        """
        self.sources, self.options, self.processor = tuple(sources), options, processor
        if plan is None:
            plan = open_plan(self.sources, options, processor)
            plan.datasets.cache.is_decoded = True
        self.plan = plan
        run = run or Watched()
        self.pace = Pace(1.0 if run.loader is None else _GUEST_SHARE)
        self.catalog = Catalog(self.plan, self.pace)
        self.overview = Overview(self.catalog)
        encoding = threading.Lock()  # tokenizers are not to be called by several threads
        self.samples = SampleReader(self.catalog, processor, encoding)
        self.book = PlanBook(self.catalog, self.sources, processor, Settings(options, world), encoding)
        self.book.stand_at(run.state, run.epochs_before)
        self._bad = run.bad
        # Weak: a loader that is dropped ends its builders.
        self._loader = None if run.loader is None else weakref.ref(run.loader)
        self._follow()
        self.patience_s = _PATIENCE_S
        """How long a page is waited for before a waiting one is shown."""
        self._pending: dict[Hashable, tuple[float, Future[Any]]] = {}
        """When a page was last asked for, and the page."""
        self._kept: OrderedDict[Hashable, list[bytes]] = OrderedDict()
        self._num_bytes = 0
        self._guard = threading.Lock()
        self._drawing = threading.Lock()

    def close(self) -> None:
        """End threads and connections."""
        self.pace.is_closed = True
        self.catalog.close()

    def warm(self, *makes: Callable[[], object]) -> None:
        """Make in the background what somebody will ask for, one after the other, so that it does not wait then.

        In a trainer nothing is begun before somebody looks.
        """
        if self._loader is None:
            threading.Thread(target=self._make, args=(makes,), name="vlm-stream-view-warm", daemon=True).start()

    def _make(self, makes: Sequence[Callable[[], object]]) -> None:
        for make in makes:
            self.pace.rest(time.monotonic())
            if self.pace.is_closed:
                return
            with suppress(Exception):  # the page that needs it says what is wrong
                make()

    def _follow(self) -> LoaderLike | None:
        """Note where the running loader stands; return it."""
        loader = None if self._loader is None else self._loader()
        if loader is not None:
            run = RunState.from_dict(loader.state_dict())
            self.book.follow(run.plan, run.rounds * (self.options.epochs or 0))
        return loader

    def position(self) -> int:
        """Return the step that is shown where none is asked for: the next one of a run, else the first."""
        self._follow()
        state = self.book.now
        return 0 if state is None else read_state(state).delivered.steps

    def run(self) -> RunView | None:
        """Return the run at this moment; None: there is none."""
        loader = self._follow()
        if loader is None and self.book.now is None and not self._bad:
            return None
        return run_view(self.book, loader, self._bad)

    def soon(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what a function makes, or None: it takes longer, and goes on in the background.

        Who asks again waits for it.
        """
        now = time.monotonic()
        with self._guard:
            for other, (asked, page) in list(self._pending.items()):
                if page.done() and now - asked > _AGAIN_S:  # somebody has left before it came, and it is old now
                    del self._pending[other]
            is_new = key not in self._pending
            found = Future() if is_new else self._pending[key][1]
            self._pending[key] = now, found
            if is_new:
                threading.Thread(target=_fulfil, args=(found, make), name="vlm-stream-view-page", daemon=True).start()
        if not wait([found], self.patience_s if is_new else _AGAIN_S).done:
            return None
        with self._guard:
            self._pending.pop(key, None)
        return found.result()

    def frames_of(self, ref: Ref, number: int) -> list[bytes]:
        """Return the frames of a clip that are shown, decoded once."""
        with self._drawing:  # the page asks for all of them at a time
            return self.kept(("frames", ref, number), lambda: self.samples.strip(ref, number))

    def kept(self, key: Hashable, make: Callable[[], list[bytes]]) -> list[bytes]:
        """Return pictures, drawn once while there is room for them."""
        with self._guard:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        made = make()
        with self._guard:
            if key not in self._kept:
                self._kept[key] = made
                self._num_bytes += sum(map(len, made))
            while self._num_bytes > _MAX_KEPT and len(self._kept) > 1:
                self._num_bytes -= sum(map(len, self._kept.popitem(last=False)[1]))
        return made


def _fulfil(future: Future[Any], make: Callable[[], Any]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:  # raised where the result is asked for
        future.set_exception(error)
