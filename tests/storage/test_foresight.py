"""The node cache evicts what is needed last, and brings what is needed next, as jobs of the node say."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.kill_fill import cache_options, cached_files
from tests.storage.shard_data import read, write_shards
from tests.storage.test_node_cache import filler, key_of
from tests.waiting import wait_for
from vlm_stream.storage import Forecast, ShardKey, SpanReader, Uses, cache_folder
from vlm_stream.storage.cache import NodeCache, NoRoomError
from vlm_stream.storage.foresight import Foresight


def say(folder, *uses, shards="abcdef"):
    """Publish uses: (name, first draw, last draw)."""
    names, begins, ends = zip(*uses, strict=True)
    numbers = np.array([shards.index(name) for name in names])
    table = Uses(numbers, np.array(begins, dtype=float), np.array(ends, dtype=float))
    return Forecast(cache_folder(str(folder)), [key_of(name) for name in shards], table)


def fill(cache, names):
    for name in names:
        cache.obtain(key_of(name), filler(name.encode()), time.sleep)[0].close()


def held(cache):
    return "".join(name for name in "abcdef" if cache.has(key_of(name)))


def test_what_is_needed_last_goes_first(tmp_path):
    cache = NodeCache(str(tmp_path), 3300)
    job = say(tmp_path, ("a", 0, 9), ("d", 5, 9), ("c", 10, 19), ("b", 20, 29), ("a", 30, 39))
    fill(cache, "abc")
    fill(cache, "d")  # the least recently used one is a, which is in use
    assert held(cache) == "acd"
    job.move(15, 1.0)
    fill(cache, "b")  # d has no further use, a comes last of the others
    assert held(cache) == "abc"
    with pytest.raises(NoRoomError):  # and d is worth nobody's place any more
        fill(cache, "d")
    job.close()
    assert not list(cache_folder(str(tmp_path)).glob("*.plan"))


def test_shards_in_use_are_not_evicted_for_each_other(tmp_path):
    cache = NodeCache(str(tmp_path), 3300, min_idle_s=0)
    job = say(tmp_path, *((name, 0, 9) for name in "abcd"))
    fill(cache, "abc")
    with pytest.raises(NoRoomError):
        fill(cache, "d")
    assert held(cache) == "abc"
    job.close()


def test_a_shard_counts_by_the_job_that_needs_it_first(tmp_path):
    cache = NodeCache(str(tmp_path), 3300)
    first = say(tmp_path, ("a", 90, 99), ("b", 20, 29), ("d", 0, 9))
    second = say(tmp_path, ("a", 10, 19), ("c", 30, 39))
    fill(cache, "abc")
    fill(cache, "d")
    assert held(cache) == "abd"
    first.close()
    second.close()


def fewest_downloads(moments, room):
    """Return how few shards any cache can bring that holds what is in use at each moment, by trying all of them."""
    costs = {frozenset(): 0}
    for wanted in moments:
        found = {}
        for held, cost in costs.items():
            others = sorted(held - wanted)
            for kept in itertools.combinations(others, min(room - len(wanted), len(others))):
                now = wanted.union(kept)
                found[now] = min(cost + len(wanted - held), found.get(now, cost + 99))
        costs = found
    return min(costs.values())


@st.composite
def jobs(draw):
    """Draw 1 to 3 jobs: draws a second, and which shards are in use between which draws."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
        ends = list(itertools.accumulate(sizes))
        groups = [draw(st.sets(st.sampled_from("abcdef"), min_size=1, max_size=2)) for _ in sizes]
        found.append((draw(st.sampled_from([0.5, 1.0, 4.0])), list(zip(groups, [0, *ends], ends, strict=False))))
    return found


@given(jobs(), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_no_cache_brings_fewer_shards_for_any_jobs(tmp_path_factory, jobs, spare):
    moments = sorted({begin / rate for rate, uses in jobs for _, begin, _ in uses})
    wanted = [
        frozenset().union(*(group for rate, uses in jobs for group, begin, end in uses if begin <= at * rate < end))
        for at in moments
    ]
    room = max(map(len, wanted)) + spare
    folder = tmp_path_factory.mktemp("cache")
    cache, num_downloads = NodeCache(str(folder), room * 1056), 0
    told = [
        (rate, say(folder, *((name, begin, end) for group, begin, end in uses for name in group)))
        for rate, uses in jobs
    ]
    for at, names in zip(moments, wanted, strict=True):
        for rate, job in told:
            job.move(at * rate, rate)
        for name in sorted(names):
            shard, downloaded = cache.obtain(key_of(name), filler(b"x"), time.sleep)
            shard.close()
            num_downloads += downloaded
    assert num_downloads == fewest_downloads(wanted, room)
    for _, job in told:
        job.close()


def test_without_a_word_the_least_recently_used_goes_first(tmp_path):
    cache = NodeCache(str(tmp_path), 3300, min_idle_s=0)
    job = say(tmp_path, ("b", 20, 29), shards="b")
    fill(cache, "cab")
    os.utime(cache._file(key_of("c"), "shard"), (0, 0))
    fill(cache, "d")
    assert held(cache) == "abd"
    job.close()


def test_a_table_ends_with_its_process(tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]);"
        "from tests.storage.test_foresight import say; job = say(sys.argv[2], ('a', 5, 9)); print('said', flush=True);"
        "time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, Path.cwd(), tmp_path], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"said\n"
    foresight = Foresight(cache_folder(str(tmp_path)))
    name = key_of("a").digest.hex()
    assert foresight.due().seconds(name) > 0
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert foresight.due().seconds(name) is None
    assert not list(cache_folder(str(tmp_path)).glob("*.plan"))


@given(st.binary(max_size=200), st.integers(0, 400))
@settings(max_examples=50, deadline=None)
def test_a_spoiled_table_is_not_read(tmp_path_factory, junk, at):
    folder = tmp_path_factory.mktemp("cache")
    job = say(folder, ("a", 5, 9))
    whole = job._path.read_bytes()
    for data in (whole[:at] + junk + whole[at + len(junk) :], whole[:at], junk):
        with job._path.open("r+b") as file:
            file.truncate(0)
            file.write(data)
        seconds = Foresight(cache_folder(str(folder))).due().seconds(key_of("a").digest.hex())
        assert seconds is None or seconds >= 0 or np.isnan(seconds)
    job.close()


def test_what_comes_soon_is_brought_before_it_is_asked_for(tmp_path, s3_server):
    shards = write_shards(s3_server.url("foresight"), num_shards=4, options=s3_server.options)
    keys = [ShardKey(span.root, span.path, span.shard_size, span.etag) for span in shards.spans[::20]]
    folder = cache_folder(str(tmp_path))
    times = np.array([0.0, 1.0, 2.0, 1e9])
    job = Forecast(folder, keys, Uses(np.arange(4), times, times + 10))
    job.move(0.5, 1.0)
    with SpanReader(cache_options(tmp_path), store_options=s3_server.options) as reader:
        for tag, result in read(reader, [(0, shards.spans[0])]):
            shards.assert_equal(tag, result)
        wait_for(lambda: len(cached_files(tmp_path)) >= 3)
        assert {file.stem for file in cached_files(tmp_path)} == {key.digest.hex() for key in keys[:3]}
        # The last one is not needed for long: one sample of it is read from the store, and the shard is not brought.
        read(reader, [(60, shards.spans[60])])
        assert len(cached_files(tmp_path)) == 3
    job.close()


def test_jobs_with_the_same_process_number_have_tables_of_their_own(tmp_path, monkeypatch):
    """As in containers, where everybody is process 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    jobs = []
    for name in "ab":
        monkeypatch.setattr("vlm_stream.storage.foresight._numbers", itertools.count(), raising=False)
        jobs.append(say(tmp_path, (name, 5, 9), shards=name))
    due = Foresight(cache_folder(str(tmp_path))).due()
    assert all(due.seconds(key_of(name).digest.hex()) for name in "ab")
    for job in jobs:
        job.close()


def test_shards_on_this_machine_are_not_brought_and_keep_nothing_from_it(tmp_path, s3_server):
    """A mixture of a dataset on a disk and one in a store."""
    local = write_shards(str(tmp_path / "local"), num_shards=2)
    remote = write_shards(s3_server.url("foresight-mixed"), num_shards=2, options=s3_server.options)
    keys = [ShardKey(span.root, span.path, span.shard_size, span.etag) for span in (*local.spans, *remote.spans)[::20]]
    job = Forecast(cache_folder(str(tmp_path)), keys, Uses(np.arange(4), np.zeros(4), np.ones(4)), 1.0)
    with SpanReader(cache_options(tmp_path), store_options=s3_server.options) as reader:
        read(reader, [(0, local.spans[0])])
        read(reader, [(1, remote.spans[0])])
        wait_for(lambda: len(cached_files(tmp_path)) == 2)
        assert {file.stem for file in cached_files(tmp_path)} == {key.digest.hex() for key in keys[2:]}
    job.close()


def test_each_store_has_a_process_that_brings(tmp_path, s3_server):
    """Two jobs of a node read two stores, and neither can open the other's."""
    options, readers, jobs = s3_server.options, [], []
    for number in range(2):
        shards = write_shards(s3_server.url(f"foresight-{number}"), num_shards=2, options=options)
        keys = [ShardKey(span.root, span.path, span.shard_size, span.etag) for span in shards.spans[::20]]
        jobs.append(Forecast(cache_folder(str(tmp_path)), keys, Uses(np.arange(2), np.zeros(2), np.ones(2)), 1.0))
        readers.append(SpanReader(cache_options(tmp_path), store_options=options))
        read(readers[-1], [(0, shards.spans[0])])
    wait_for(lambda: len(cached_files(tmp_path)) == 4)
    for each in (*readers, *jobs):
        each.close()


def test_a_closed_reader_has_no_thread_that_brings(tmp_path, s3_server):
    shards = write_shards(s3_server.url("foresight-closed"), num_shards=1, options=s3_server.options)
    with SpanReader(cache_options(tmp_path), store_options=s3_server.options) as reader:
        read(reader, [(0, shards.spans[0])])
        assert any(thread.name == "vlm-stream-ahead" for thread in threading.enumerate())
    wait_for(lambda: not any(thread.name == "vlm-stream-ahead" for thread in threading.enumerate()))
