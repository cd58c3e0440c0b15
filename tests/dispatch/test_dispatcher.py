"""Workers die, hang, stop, grow and fail; the batches still come in order, each once."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.dispatch.jobs import COUNT, Numbers, dispatch, plan, run
from tests.waiting import wait_for
from vlm_stream.dispatch import Dispatcher, DispatchOptions, ProcessPool, processes, schedule, values
from vlm_stream.dispatch.pool import Joined
from vlm_stream.dispatch.values import Limit
from vlm_stream.errors import ConfigError, StorageError, WorkerError

KILLED = "died (SIGKILL, often the out-of-memory killer)"


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_self():
    os.kill(os.getpid(), signal.SIGSTOP)


def hang():
    time.sleep(600)


def refuse():
    raise ConfigError("the plan has no samples")


class StubbornError(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, one, two):
        super().__init__(one)


def fail_stubbornly():
    raise StubbornError("boom", 2)


def flags(tmp_path, count=1):
    return tuple(tmp_path / f"flag-{number}" for number in range(count))


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_batches_come_in_order(num_workers):
    _, dispatcher = run(Numbers(), num_workers=num_workers)
    assert dispatcher.pids() == []


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_workers_start_in_every_way(nothing_is_late, start_method):
    _, dispatcher = run(Numbers(), num_workers=2, start_method=start_method)
    assert dispatcher.num_restarts == 0


def test_a_script_without_a_guard_starts_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.dispatch.jobs import Numbers, run\n"
        "print(len(run(Numbers(), start_method='forkserver')[0]))\n"
    )
    done = subprocess.run(
        [sys.executable, script, Path.cwd()], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == [str(COUNT)], done.stderr


def test_what_cannot_be_sent_to_workers_is_refused():
    with pytest.raises(ConfigError, match=r"cannot be sent to worker processes .*collate_fn at the top level"):
        dispatch(Numbers({1: lambda: None}), start_method="spawn")


def test_what_is_forked_may_hold_anything():
    batches, _ = run(Numbers({1: lambda: None}), start_method="fork")
    assert len(batches) == COUNT


class Environment(Numbers):
    def make(self, number):
        return super().make(number) | {"found": os.environ.get("VLM_STREAM_TEST")}


def test_workers_see_the_environment_as_it_is_when_they_start(monkeypatch):
    run(Environment(), start_method="forkserver", num_workers=1)  # the server runs from here on
    monkeypatch.setenv("VLM_STREAM_TEST", "new")
    batches, _ = run(Environment(), start_method="forkserver", num_workers=1)
    assert {batch["found"] for batch in batches} == {"new"}


class Functions(Numbers):
    def make(self, number):
        return super().make(number) | ({"function": lambda: 0} if number == 4 else {})


@pytest.mark.parametrize("num_workers", [1, 3])
def test_what_cannot_be_sent_ends_the_run_with_a_sentence(num_workers):
    with pytest.raises(WorkerError, match=r"a batch cannot be sent by its worker.*lambda.*Let collate_fn return"):
        run(Functions(), num_workers=num_workers)


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_sample_that_ends_workers_is_left_out(nothing_is_late, start_method):
    batches, dispatcher = run(Numbers({7: os.abort}), num_workers=2, start_method=start_method)
    said = {batch["number"]: batch["said"] for batch in batches if "said" in batch}
    assert said.keys() == {7}
    assert said[7].startswith(
        "2 workers were lost while they worked on it (the last one died (SIGABRT)), so it is left out"
    )
    assert dispatcher.num_restarts == 2


def test_a_signal_that_may_come_from_outside_must_come_three_times(nothing_is_late):
    batches, dispatcher = run(Numbers({7: kill_self, 30: kill_self}), max_restarts=4)
    said = {batch["number"]: batch["said"] for batch in batches if "said" in batch}
    assert said.keys() == {7, 30}
    assert "3 workers were lost" in said[7]
    assert "SIGKILL" in said[7]
    assert dispatcher.num_restarts == 6  # of which none counts


@pytest.mark.parametrize(("act", "times"), [(os.abort, 1), (kill_self, 2)])
def test_a_sample_during_which_workers_died_by_chance_is_kept(nothing_is_late, tmp_path, act, times):
    batches, dispatcher = run(Numbers({7: act}, flags(tmp_path, times)))
    assert not any("said" in batch for batch in batches)
    assert dispatcher.num_restarts == times


def test_a_sample_that_hangs_is_left_out(caplog):
    with caplog.at_level(logging.WARNING):
        batches, _ = run(Numbers({7: hang}), hang_s=5.0)
    assert [batch["number"] for batch in batches if "said" in batch] == [7]
    assert "has finished nothing for" in caplog.text


@pytest.mark.parametrize("at", [0, 7, COUNT - 1])
def test_a_killed_worker_is_replaced(nothing_is_late, tmp_path, caplog, at):
    with caplog.at_level(logging.WARNING):
        _, dispatcher = run(Numbers({at: kill_self}, flags(tmp_path)))
    assert dispatcher.num_restarts == 1
    assert f"{KILLED} while it worked on row {at} of shard 1 of source 0; others build its batches" in caplog.text


def test_a_worker_that_stops_loses_its_batch_to_another_one(tmp_path):
    _, dispatcher = run(Numbers({20: stop_self}, flags(tmp_path), seconds=0.01))
    assert dispatcher.counts()["built_twice"] >= 1  # nothing else would have ended it


@pytest.fixture
def quick_doubt(monkeypatch):
    """Let a minute be short."""
    monkeypatch.setattr(schedule, "_ALONE", Limit(10.0, 0.5))
    monkeypatch.setattr(schedule, "_SUSPENDED_S", 0.5)
    monkeypatch.setattr(values, "_UNKNOWN_S", 0.5)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_that_all_stop_are_replaced(quick_doubt, num_workers):
    dispatcher = dispatch(Numbers(seconds=0.02), num_workers=num_workers, max_restarts=200, max_bytes=500)
    seen = []
    for _, delivery in dispatcher:
        seen.append(delivery.batch["number"])
        if len(seen) == 20:
            for pid in dispatcher.pids():
                os.kill(pid, signal.SIGSTOP)
    dispatcher.close()
    assert seen == list(range(COUNT))
    assert dispatcher.num_restarts >= 1  # who comes may build the others' batches before these are doubted


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_sample_that_hangs_everywhere_is_left_out_although_no_time_is_set(quick_doubt, num_workers):
    batches, _ = run(Numbers({7: hang}), num_workers=num_workers, max_restarts=200)
    said = {batch["number"]: batch["said"] for batch in batches if "said" in batch}
    assert said.keys() == {7}
    assert "3 workers were lost while they worked on it (the last one hung)" in said[7]


def test_a_worker_that_keeps_dying_ends_the_run(nothing_is_late):
    with pytest.raises(WorkerError, match=r"(?s)died \(exit code 3\).*after 0 others had failed.*raise max_restarts"):
        run(Numbers({5: exit_three}), max_restarts=0)


def exit_three():
    os._exit(3)


def test_an_error_of_ours_arrives_as_it_was():
    with pytest.raises(ConfigError, match="the plan has no samples"):
        run(Numbers({5: refuse}))


def test_an_error_comes_in_its_turn():
    dispatcher = dispatch(Numbers({5: refuse}))
    for number in range(5):
        assert next(dispatcher)[1].batch["number"] == number
    with pytest.raises(ConfigError):
        next(dispatcher)
    dispatcher.close()


class Unreachable(Numbers):
    def fetch(self, number):
        if number == 5:
            raise StorageError("no request would ever end here")


def test_an_error_of_fetching_comes_in_its_turn(nothing_is_late):
    dispatcher = dispatch(Unreachable())
    for number in range(5):
        assert next(dispatcher)[1].batch["number"] == number
    with pytest.raises(StorageError, match="no request would ever end here"):
        next(dispatcher)
    dispatcher.close()
    assert dispatcher.num_restarts == 0


def test_an_error_that_cannot_travel_arrives_as_text():
    with pytest.raises(WorkerError, match=r"(?s)a worker failed.*StubbornError: boom"):
        run(Numbers({5: fail_stubbornly}))


class Unopenable(Numbers):
    def open(self, watch):
        raise ConfigError("the processor cannot be loaded")


def test_a_builder_that_cannot_be_opened_ends_the_run():
    with pytest.raises(ConfigError, match="the processor cannot be loaded"):
        run(Unopenable())


def broken_plan(count):
    yield from plan(7)
    raise ConfigError("the index is gone")


def test_an_error_of_the_plan_comes_after_what_was_planned():
    dispatcher = dispatch(Numbers(), plan_of=broken_plan)
    assert [next(dispatcher)[1].batch["number"] for _ in range(7)] == list(range(7))
    with pytest.raises(ConfigError, match="the index is gone"):
        next(dispatcher)
    dispatcher.close()


def test_closing_early_leaves_no_process_and_no_thread():
    before = set(threading.enumerate())
    dispatcher = dispatch(Numbers())
    next(dispatcher)
    pids = dispatcher.pids()
    assert pids
    dispatcher.close()
    wait_for(lambda: not any(map(is_running, pids)))
    wait_for(lambda: not any(each.name.startswith("vlm-stream") for each in set(threading.enumerate()) - before))


class Big(Numbers):
    """Batches that are much larger than what a connection holds."""

    def make(self, number):
        return super().make(number) | {"data": bytes(20_000_000)}


@pytest.mark.parametrize("config", ["Numbers()", "Big()", "Numbers({1: stop_self})"])
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_workers_end_with_their_parent(start_method, config):
    code = (
        "import os, signal, sys; sys.path.insert(0, os.getcwd());"
        "from tests.dispatch.test_dispatcher import Numbers, Big, dispatch, stop_self;"
        f"d = dispatch({config}, num_workers=2, start_method='{start_method}');"
        "next(d);"
        "import time; time.sleep(1); print(*d.pids(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert pids, done.stderr
    wait_for(lambda: not any(map(is_running, pids)))


def is_running(pid):
    return state_of(pid) not in ("", "Z")


def state_of(pid):
    """Return the letter that the system has for what a process does; empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_lost_in_the_middle_of_messages_are_replaced(how):
    dispatcher = dispatch(Big(num_bytes=20_000_000), num_workers=2, hang_s=2.0, max_restarts=1000)
    seen = []
    for _, delivery in dispatcher:
        seen.append(delivery.batch["number"])
        if seen[-1] % 10 == 3 and dispatcher.pids():
            os.kill(dispatcher.pids()[seen[-1] // 10 % len(dispatcher.pids())], how)
    dispatcher.close()
    assert seen == list(range(COUNT))


def test_workers_that_die_after_their_last_batch_hang_nobody():
    dispatcher = dispatch(Numbers(), num_workers=2)
    seen = []
    for _, delivery in dispatcher:
        seen.append(delivery.batch["number"])
        if seen[-1] == COUNT - 1:
            for pid in dispatcher.pids():
                os.kill(pid, signal.SIGKILL)
    dispatcher.close()
    assert seen == list(range(COUNT))
    assert dispatcher.pids() == []


def test_the_number_of_workers_may_change(nothing_is_late):
    """No more than 20 batches are begun ahead: the others are built by those who are there then."""
    dispatcher = dispatch(Numbers(seconds=0.05, num_bytes=100), count=120, num_workers=1, max_bytes=2000)
    changes = {20: 4, 70: 1}
    seen, pids = [], {}
    for _, delivery in dispatcher:
        seen.append(delivery.batch["number"])
        pids[seen[-1]] = delivery.batch["pid"]
        if (wanted := changes.get(seen[-1])) is not None:
            dispatcher.set_workers(wanted)
            wait_for(lambda wanted=wanted: len(dispatcher.builders()) == wanted)
    dispatcher.close()
    assert seen == list(range(120))
    assert len({pids[number] for number in range(20)}) == 1
    assert len({pids[number] for number in range(41, 71)}) > 1
    assert len({pids[number] for number in range(91, 120)}) == 1
    assert dispatcher.num_restarts == 0


def test_workers_that_are_no_longer_wanted_when_they_come_are_let_go(nothing_is_late):
    dispatcher = dispatch(Numbers(seconds=0.02), count=150, num_workers=1)
    next(dispatcher)
    dispatcher.set_workers(4)
    dispatcher.set_workers(1)
    pids = [delivery.batch["pid"] for _, delivery in dispatcher]
    dispatcher.close()
    assert len(pids) == 149
    assert len(set(pids[-20:])) == 1


def test_a_worker_is_known_before_it_is_heard(nothing_is_late, monkeypatch):
    """What is given to it at the moment at which it is ready must reach it, however late its starter goes on."""
    start = processes._Worker.__init__

    def start_and_dawdle(self, *args):
        start(self, *args)
        time.sleep(0.5)

    monkeypatch.setattr(processes._Worker, "__init__", start_and_dawdle)
    _, dispatcher = run(Numbers(), num_workers=2, hang_s=60)
    assert dispatcher.num_restarts == 0


HELD = []


def leak():
    HELD.append(bytearray(os.urandom(1) * (64 << 20)))


def test_a_worker_that_grows_is_replaced_between_batches(nothing_is_late):
    acts = dict.fromkeys(range(COUNT), leak)
    batches, dispatcher = run(Numbers(acts), num_workers=2, max_worker_bytes=1 << 30, start_method="forkserver")
    assert dispatcher.num_recycled >= 1
    assert dispatcher.num_restarts == 0
    assert len({batch["pid"] for batch in batches}) > 2


def test_a_limit_below_the_size_of_a_fresh_worker_is_said_once(nothing_is_late, caplog):
    with caplog.at_level(logging.WARNING):
        _, dispatcher = run(Numbers(), num_workers=2, max_worker_bytes=1 << 20)
    said = [record.getMessage() for record in caplog.records if "worker_memory" in record.getMessage()]
    assert len(said) == 1
    assert re.match(
        r"worker_memory is 1 MB, and worker \d has \d+ MB after its first batches, so each worker is replaced after 4 "
        r"batches, .* raise worker_memory, or leave it out",
        said[0],
    )
    assert 1 <= dispatcher.num_recycled <= COUNT // 4


class GuestPool(ProcessPool):
    """Its processes come by themselves, as those of a named pool do."""

    def __init__(self, config, listener):
        super().__init__(config, self._as_guest, start_method="fork")
        self._to = listener
        self.grow()

    def _as_guest(self, event):
        self._to(event._replace(kind="guest") if isinstance(event, Joined) else event)


def test_guests_are_not_ended_for_their_size():
    dispatcher = Dispatcher(
        plan(), lambda listener: GuestPool(Numbers(), listener), DispatchOptions(num_workers=0, max_worker_bytes=1)
    )
    pids = {delivery.batch["pid"] for _, delivery in dispatcher}
    dispatcher.close()
    assert len(pids) == 1
    assert dispatcher.num_recycled == 0


def test_bytes_begun_and_not_taken_stay_within_the_limit():
    dispatcher = dispatch(Numbers(num_bytes=1000), count=200, num_workers=2, max_bytes=10_000)
    seen = []
    for _, delivery in dispatcher:
        seen.append(delivery.batch["number"])
        if len(seen) == 50:
            wait_for(lambda: dispatcher.num_ready() >= 5 and not any(row["queued"] for row in dispatcher.builders()))
            assert dispatcher.num_ready() <= 10
    dispatcher.close()
    assert seen == list(range(200))
