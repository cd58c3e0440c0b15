"""What a builder that is silent costs its sample, and itself: on a clock that the test moves."""

import logging
import multiprocessing
from types import SimpleNamespace

import pytest

from tests.dispatch.jobs import plan
from tests.dispatch.test_model import Table
from tests.waiting import wait_for
from vlm_stream.dispatch import Dispatcher, DispatchOptions, worker
from vlm_stream.dispatch import dispatcher as dispatcher_module
from vlm_stream.dispatch.pool import Lost
from vlm_stream.dispatch.worker import SampleNote

REF = (0, 1, 0)


class OneBuilder:
    """A dispatcher of one batch; its builder does what the test says."""

    def __init__(self, monkeypatch, **options):
        self.now = 1000.0
        monkeypatch.setattr(dispatcher_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(dispatcher_module, "_START_S", 1e9)
        monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic_ns=lambda: int(self.now * 1e9)))
        self.dispatcher = Dispatcher(plan(1), self.open_pool, DispatchOptions(num_workers=1, **options))

    def open_pool(self, listener):
        self.table = Table(listener)
        return self.table

    def start(self):
        """Let the builder be ready; return it, and what it is to leave out of its batch."""
        (builder,) = self.table.starting
        self.table.join(builder)
        wait_for(lambda: self.table.queues[builder])  # a thread plans
        self.note = SampleNote(multiprocessing)
        return builder, self.table.queues[builder][0][2]

    def is_ended(self, builder, seconds):
        """Let time pass; tell whether the builder is ended, as one that is silent."""
        self.now += seconds
        with self.dispatcher._changed:
            self.dispatcher._look_for_hangs()
        if builder not in self.table.ending:
            return False
        del self.table.queues[builder]
        self.table.listener(Lost(builder, self.table.ending.pop(builder), None, self.note.read()))
        return True


@pytest.mark.parametrize(("before_s", "is_blamed"), [(1.0, True), (12.0, False)])
def test_a_sample_is_not_blamed_for_the_time_that_others_took(monkeypatch, caplog, before_s, is_blamed):
    one = OneBuilder(monkeypatch, hang_s=20.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            builder, skipped = one.start()
            assert not skipped
            assert not one.is_ended(builder, before_s)
            one.note.begin(REF)
            assert one.is_ended(builder, 21.0 - before_s)
    assert "has finished nothing for 21 s while it worked on row 0 of shard 1 of source 0" in caplog.text
    assert set(one.start()[1]) == ({REF} if is_blamed else set())
    one.dispatcher.close()


def test_a_builder_that_is_only_slow_comes_to_its_end(monkeypatch):
    """Each of those that are silent over a batch, with nobody else to build it, may take twice as long as the last."""
    one = OneBuilder(monkeypatch)
    for _ in range(2):
        builder, _ = one.start()
        one.note.begin(REF)
        assert any(one.is_ended(builder, 1.0) for _ in range(200))
    builder, skipped = one.start()
    one.note.begin(REF)
    assert not any(one.is_ended(builder, 1.0) for _ in range(200))
    assert not skipped
    one.table.build(builder)
    assert next(one.dispatcher)[1].batch["left"] == []
    assert one.dispatcher.num_restarts == 2
    one.dispatcher.close()
