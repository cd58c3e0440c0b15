"""Every wait has an end, or at least a sentence: what is waited for, by whom, since when, and where everybody is."""

import logging
import multiprocessing.forkserver
import os
import re
import signal
import time
from functools import partial

import pytest

from tests.dispatch.jobs import COUNT, Numbers, dispatch, run
from tests.dispatch.test_dispatcher import flags, hang, is_running, state_of, stop_self
from tests.waiting import wait_for
from vlm_stream.dispatch import dispatcher as dispatcher_module
from vlm_stream.dispatch import processes, watchdog
from vlm_stream.dispatch.watchdog import all_stacks, read_stacks
from vlm_stream.errors import WorkerError
from vlm_stream.stream import VLMStream


@pytest.fixture
def quick_words(monkeypatch):
    """Let a minute be short."""
    monkeypatch.setattr(dispatcher_module, "SAY_S", 0.5)
    monkeypatch.setattr(watchdog, "SAY_S", 0.5)


def test_a_trainer_that_waits_is_told_for_what_by_whom_and_since_when(quick_words, caplog, tmp_path):
    with caplog.at_level(logging.WARNING):
        run(Numbers({7: hang}, flags(tmp_path)), num_workers=1, hang_s=5.0)
    waits = "rank 0 waits for step 7, micro-batch 0; builder 0 has been silent for"
    told = [record.getMessage() for record in caplog.records if waits in record.getMessage()]
    assert len(told) >= 2  # and again
    assert re.search(r"no batch for \d+ s, since \d\d:\d\d:\d\d: rank 0", told[-1])
    assert "1 builders are alive, 0 are being started" in told[-1]
    assert "A silent builder is replaced after 5 s" in told[-1]
    assert "loader.stacks()" in told[-1]


def test_without_a_time_it_is_said_when_a_builder_is_replaced(quick_words, caplog, tmp_path):
    with caplog.at_level(logging.WARNING):
        run(Numbers({7: dawdle}, flags(tmp_path)), num_workers=1)
    assert "replaced after minutes if nobody else can help (worker_timeout is not set)" in caplog.text


def dawdle():
    time.sleep(4)


def test_a_plan_that_does_not_come_is_named(quick_words, caplog):
    def plan_of(count):
        wait_for(lambda: "the plan has not come to its next step" in caplog.text)
        yield from ()

    with caplog.at_level(logging.WARNING):
        dispatcher = dispatch(Numbers(), plan_of=plan_of, num_workers=1)
        assert list(dispatcher) == []  # which raises what the plan raises
        dispatcher.close()


def test_a_trainer_that_builds_by_itself_is_told_too(quick_words, caplog, toy_shards):
    def told():
        return [record.getMessage() for record in caplog.records if "no batch for" in record.getMessage()]

    def collate(rows, _processor):
        if rows[0].key.endswith("5"):
            what = "step 5, micro-batch 0 of rank 0 is being built in this process (num_workers=0)"
            wait_for(lambda: any(what in each for each in told()))
        return {}

    stream = VLMStream(toy_shards, processor=None, mode="plain", collate=collate, shuffle=False)
    with caplog.at_level(logging.WARNING):
        pairs = stream.deliveries()
        for _ in range(8):
            next(pairs)
        before = told()
        time.sleep(1.0)  # the trainer's own time
        pairs.close()
    assert told() == before
    assert "worker_timeout a sample that hangs is left out" in before[0]


class SlowOpening(Numbers):
    def open(self, watch):
        time.sleep(600)


def test_builders_that_never_become_ready_end_the_run(monkeypatch):
    monkeypatch.setattr(dispatcher_module, "_START_S", 3.0)
    with pytest.raises(WorkerError, match=r"was not ready \d+ s after its start, after 1 others had failed"):
        run(SlowOpening(), num_workers=1, hang_s=0.5, max_restarts=1)


class DawdlingOpening(Numbers):
    def open(self, watch):
        time.sleep(2.5)
        return super().open(watch)


def test_builders_elsewhere_may_wait_for_room(monkeypatch):
    monkeypatch.setattr(dispatcher_module, "_START_S", -19.0)  # after a second, if they were processes here
    _, dispatcher = run(DawdlingOpening(), num_workers=1, hang_s=20.0, are_remote=True)
    assert dispatcher.num_restarts == 0


def test_a_stopped_fork_server_ends_the_run_with_a_sentence(monkeypatch):
    dispatcher = dispatch(Numbers(seconds=0.05), num_workers=1, hang_s=0.5, start_method="forkserver", count=400)
    next(dispatcher)
    monkeypatch.setattr(dispatcher_module, "_START_S", 1.0)
    monkeypatch.setattr(processes, "_JOIN_S", 1.0)
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)
    begin = time.monotonic()
    try:
        for pid in dispatcher.pids():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"no builder could be started in .* a stopped fork server"):
            for _ in dispatcher:
                pass
        dispatcher.close()
    finally:
        os.kill(server, signal.SIGCONT)
    assert time.monotonic() - begin < 300  # it waits for nothing that cannot come


def test_a_killed_fork_server_costs_its_builders_and_leaves_none_behind():
    dispatcher = dispatch(Numbers(seconds=0.02), num_workers=2, start_method="forkserver")
    seen = [next(dispatcher)[1].batch["number"]]
    pids = dispatcher.pids()
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    seen += [delivery.batch["number"] for _, delivery in dispatcher]
    pids += dispatcher.pids()
    dispatcher.close()
    assert seen == list(range(COUNT))
    wait_for(lambda: not any(map(is_running, pids)))


def deep_in_a_decoder(end):
    wait_for(end.exists)


def test_stacks_of_builders_can_be_asked_for(tmp_path):
    end = tmp_path / "end"
    dispatcher = dispatch(Numbers({0: partial(deep_in_a_decoder, end)}, flags(tmp_path)), num_workers=1)
    wait_for(dispatcher.builders)
    (pid,) = dispatcher.pids()
    for _ in range(2):  # it may be asked again
        wait_for(lambda: "deep_in_a_decoder" in read_stacks(pid))
    end.touch()
    assert len(list(dispatcher)) == COUNT
    dispatcher.close()
    assert "has no stacks to show" in read_stacks(pid)


def test_a_stopped_builder_is_said_to_be_stopped(tmp_path):
    dispatcher = dispatch(Numbers({0: stop_self}, flags(tmp_path)), num_workers=1)
    wait_for(dispatcher.builders)
    (pid,) = dispatcher.pids()
    wait_for(lambda: state_of(pid) == "T")
    assert read_stacks(pid) == f"process {pid} does not answer (it is stopped)"
    dispatcher.close()


def test_stacks_of_this_process_name_their_threads():
    assert "test_stacks_of_this_process_name_their_threads" in all_stacks([])
    assert "thread MainThread" in all_stacks([])
