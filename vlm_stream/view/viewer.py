"""The viewer: everything that pages are made of, opened once.

Enters: sources, options, maybe a processor, a state, a running loader. Leaves: a catalog of samples, a reader of single
ones, plans by their settings; and what was drawn, kept within a bound of memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.plan import read_state
from vlm_stream.planning import open_plan
from vlm_stream.state import RunState
from vlm_stream.view.catalog import Catalog
from vlm_stream.view.overview import Overview
from vlm_stream.view.runs import Watched, run_view
from vlm_stream.view.sample import SampleReader
from vlm_stream.view.steps import PlanBook, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

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
_MOST_WAITING: Final = 8
"""Pages that were made and are not asked for again."""
_GUEST_SHARE: Final = 0.1
"""Of a core, for threads in a trainer's process."""


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
        self.plan = plan or open_plan(self.sources, options, processor)
        self.catalog = Catalog(self.plan)
        self.overview = Overview(self.catalog)
        encoding = threading.Lock()  # tokenizers are not to be called by several threads
        self.samples = SampleReader(self.catalog, processor, encoding)
        self.book = PlanBook(self.catalog, self.sources, processor, Settings(options, world), encoding)
        run = run or Watched()
        self.book.stand_at(run.state, run.epochs_before)
        self._bad = run.bad
        self._loader = (
            None if run.loader is None else weakref.ref(run.loader)
        )  # a loader that is dropped ends its builders
        if run.loader is not None:
            self.book.share = self.catalog.share = _GUEST_SHARE
        self._follow()
        self.patience_s = _PATIENCE_S
        """How long a page is waited for before a waiting one is shown."""
        self._pending: dict[Hashable, Future[Any]] = {}
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._num_bytes = 0
        self._guard = threading.Lock()
        self._drawing = threading.Lock()

    def close(self) -> None:
        """End threads and connections."""
        self.catalog.close()

    def warm(self) -> None:
        """Begin to read indexes and to plan in the background, so that the first pages do not wait for it.

        In a trainer nothing is begun before somebody looks.
        """
        if self._loader is None:
            self.catalog.start_scan()
            self.book.run_walk().start()

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
        with self._guard:
            found = self._pending.get(key)
            patience_s = self.patience_s if found is None else _AGAIN_S
            if found is None:
                found = self._pending[key] = Future()
                threading.Thread(target=_fulfil, args=(found, make), name="vlm-stream-view-page", daemon=True).start()
        if not wait([found], patience_s).done:
            return None
        with self._guard:
            self._pending.pop(key, None)
            for other in [each for each, future in self._pending.items() if future.done()][:-_MOST_WAITING]:
                del self._pending[other]  # somebody has left before the page came
        return found.result()

    def kept(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        """Return a picture, drawn once while there is room for it."""
        found: bytes = self._keep(key, make, len)
        return found

    def frames_of(self, ref: Ref, number: int) -> list[bytes]:
        """Return the frames of a clip that are shown, decoded once."""
        with self._drawing:  # the page asks for all of them at a time
            found: list[bytes] = self._keep(
                ("frames", ref, number), lambda: self.samples.strip(ref, number), lambda frames: sum(map(len, frames))
            )
        return found

    def _keep(self, key: Hashable, make: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        with self._guard:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        made = make()
        with self._guard:
            if key not in self._kept:
                self._kept[key] = made, size(made)
                self._num_bytes += size(made)
            while self._num_bytes > _MAX_KEPT and len(self._kept) > 1:
                _, (_, freed) = self._kept.popitem(last=False)
                self._num_bytes -= freed
        return made


def _fulfil(future: Future[Any], make: Callable[[], Any]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:  # raised where the result is asked for
        future.set_exception(error)
