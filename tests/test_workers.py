"""Workers die, hang and fail; the items still come in order, each once."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vlm_stream.watch import begin_sample, end_sample, reason_to_skip
from vlm_stream.workers import WorkerOptions, WorkerPool

from vlm_stream.errors import ConfigError, WorkerError

COUNT = 40


class Numbers:
    """A job whose items are the numbers behind the cursor; it may trip once over one of them."""

    def __init__(self, trip=None, at=None, flag=None):
        self.trip, self.at, self.flag = trip, at, flag

    def __call__(self, cursor, first, stride):
        for number in range(cursor + first, COUNT, stride):
            if number == self.at and self._first_time():
                self.trip()
            yield number, os.getpid()

    def _first_time(self):
        if self.flag is None:
            return True
        try:
            self.flag.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def run(job, **options):
    pool = WorkerPool(job, 0, WorkerOptions(**{"num_workers": 3, **options}))
    seen = []
    for number, _ in pool.items(lambda: seen[-1] + 1 if seen else 0):
        seen.append(number)
    return seen, pool


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(60)


def refuse():
    raise ConfigError("the plan has no samples")


class StubbornError(Exception):
    """Cannot be rebuilt from its arguments."""

    def __init__(self, one, two):
        super().__init__(one)


def fail_stubbornly():
    raise StubbornError("boom", 2)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_items_come_in_order(num_workers):
    seen, pool = run(Numbers(), num_workers=num_workers)
    assert seen == list(range(COUNT))
    assert pool.pids() == []


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_workers_start_in_every_way(start_method):
    seen, pool = run(Numbers(), num_workers=2, start_method=start_method)
    assert seen == list(range(COUNT))
    assert pool.num_restarts == 0


class Samples:
    """A job that notes the numbers it works on, acts on some of them, and leaves out what it is told to."""

    def __init__(self, acts, begin_s=0.0):
        self.acts, self.begin_s = acts, begin_s

    def __call__(self, cursor, first, stride):
        for number in range(cursor + first, COUNT, stride):
            if said := reason_to_skip((0, 1, number)):
                yield number, said
                continue
            if number in self.acts:
                time.sleep(self.begin_s)
            begin_sample((0, 1, number))
            self.acts.get(number, int)()
            end_sample()
            yield number, ""


def run_samples(job, **options):
    pool = WorkerPool(job, 0, WorkerOptions(**{"num_workers": 2, "max_restarts": 2, **options}))
    seen, said = [], {}
    for number, why in pool.items(lambda: seen[-1] + 1 if seen else 0):
        seen.append(number)
        if why:
            said[number] = why
    assert seen == list(range(COUNT))
    return said, pool


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_a_sample_that_ends_workers_is_left_out(start_method):
    said, pool = run_samples(Samples({7: os.abort}), start_method=start_method)
    assert said.keys() == {7}
    assert said[7].startswith(
        "2 workers were lost while they worked on it (the last one died (SIGABRT)), so it is left out"
    )
    assert pool.num_restarts == 2


def test_a_signal_that_may_come_from_outside_must_come_three_times():
    said, pool = run_samples(Samples({7: kill_self, 30: kill_self}))
    assert said.keys() == {7, 30}
    assert "3 workers were lost" in said[7]
    assert "SIGKILL" in said[7]
    assert pool.num_restarts == 6  # of which none counts


class Once(Samples):
    """Acts on a number only as often as there are flags."""

    def __init__(self, act, number, flags):
        super().__init__({number: self.trip})
        self.act, self.flags = act, flags

    def trip(self):
        for flag in self.flags:
            try:
                flag.touch(exist_ok=False)
            except FileExistsError:
                continue
            self.act()


@pytest.mark.parametrize(("act", "times"), [(os.abort, 1), (kill_self, 2)])
def test_a_sample_during_which_workers_died_by_chance_is_kept(tmp_path, act, times):
    said, pool = run_samples(Once(act, 7, [tmp_path / str(number) for number in range(times)]))
    assert said == {}
    assert pool.num_restarts == times


def test_a_sample_is_not_blamed_for_the_time_that_others_took():
    with pytest.raises(
        WorkerError, match=r"has finished nothing for .* while it worked on row 7 of shard 1 of source 0"
    ):
        run_samples(Samples({7: hang}, begin_s=2.0), hang_s=3.0)


def test_no_sample_is_named_for_a_worker_that_died_between_two(caplog):
    pool = WorkerPool(Samples({}), 0, WorkerOptions(num_workers=1))
    seen = []
    with caplog.at_level(logging.WARNING):
        for number, _ in pool.items(lambda: seen[-1] + 1 if seen else 0):
            seen.append(number)
            if number == 10:
                time.sleep(0.5)  # until it waits for room
                os.kill(pool.pids()[0], signal.SIGKILL)
    assert seen == list(range(COUNT))
    assert "a new one goes on" in caplog.text
    assert "while it worked on" not in caplog.text


def give_functions(cursor, first, stride):
    for number in range(cursor + first, COUNT, stride):
        yield number, (lambda: 0) if number == 4 else os.getpid()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_what_cannot_be_sent_ends_the_run_with_a_sentence(num_workers):
    with pytest.raises(WorkerError, match=r"a batch cannot be sent by its worker.*lambda.*Let collate_fn return"):
        run(give_functions, num_workers=num_workers)


@pytest.mark.parametrize("at", [0, 7, COUNT - 1])
def test_a_killed_worker_is_replaced(tmp_path, caplog, at):
    with caplog.at_level(logging.WARNING):
        seen, pool = run(Numbers(kill_self, at, tmp_path / "flag"))
    assert seen == list(range(COUNT))
    assert pool.num_restarts == 1
    assert "died (SIGKILL, often the out-of-memory killer); a new one goes on" in caplog.text


def test_a_worker_killed_from_outside_while_its_items_wait_is_replaced():
    pool = WorkerPool(Numbers(), 0, WorkerOptions(num_workers=2))
    seen = []
    for number, pid in pool.items(lambda: seen[-1] + 1 if seen else 0):
        seen.append(number)
        if number == 10:
            os.kill(pid, signal.SIGKILL)
    assert seen == list(range(COUNT))


def test_a_hanging_worker_is_replaced(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        seen, pool = run(Numbers(hang, 5, tmp_path / "flag"), hang_s=2.0)
    assert seen == list(range(COUNT))
    assert pool.num_restarts == 1
    assert "has finished nothing for" in caplog.text


def test_a_worker_that_keeps_dying_ends_the_run():
    with pytest.raises(WorkerError, match=r"(?s)died \(SIGKILL.*after 2 others had failed.*raise max_restarts"):
        run(Numbers(kill_self, 5), max_restarts=2)


def test_an_error_of_ours_arrives_as_it_was():
    with pytest.raises(ConfigError, match="the plan has no samples"):
        run(Numbers(refuse, 5))


def test_an_error_that_cannot_travel_arrives_as_text():
    with pytest.raises(WorkerError, match=r"(?s)a worker failed.*StubbornError: boom"):
        run(Numbers(fail_stubbornly, 5))


def test_closing_early_leaves_no_process():
    pool = WorkerPool(Numbers(), 0, WorkerOptions(num_workers=3))
    items = pool.items(lambda: 0)
    next(items)
    pids = pool.pids()
    items.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("job", ["Numbers()", "big_items"])
@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_workers_end_with_their_parent(start_method, job):
    code = (
        "import os, signal, sys; sys.path.insert(0, os.getcwd());"
        "from tests.test_workers import Numbers, big_items; from vlm_stream.workers import WorkerOptions, WorkerPool;"
        f"options = WorkerOptions(num_workers=2, start_method='{start_method}');"
        f"pool = WorkerPool({job}, 0, options); items = pool.items(lambda: 0); next(items);"
        "print(*pool.pids(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pids = [int(pid) for pid in run.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def big_items(cursor, first, stride):
    """Items that are much larger than what a connection holds."""
    for number in range(cursor + first, COUNT, stride):
        yield number, bytes(20_000_000)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_lost_in_the_middle_of_messages_are_replaced(how):
    pool = WorkerPool(big_items, 0, WorkerOptions(num_workers=2, hang_s=2.0, max_restarts=COUNT))
    seen = []
    for number, _ in pool.items(lambda: seen[-1] + 1 if seen else 0):
        seen.append(number)
        if number % 10 == 3:
            os.kill(pool.pids()[number // 10 % 2], how)
    assert seen == list(range(COUNT))
    assert pool.num_restarts >= 2


def test_workers_that_die_behind_their_last_item_hang_nobody():
    pool = WorkerPool(Numbers(), 0, WorkerOptions(num_workers=2, prefetch=COUNT))
    seen = []
    for number, _ in pool.items(lambda: seen[-1] + 1 if seen else 0):
        seen.append(number)
        if number == COUNT - 1:
            for pid in pool.pids():
                os.kill(pid, signal.SIGKILL)
    assert seen == list(range(COUNT))
    assert pool.pids() == []
