"""The node cache with real processes, real kills and a real S3 server."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.storage.kill_fill import cache_options, cached_files, kill_during_fill
from tests.storage.shard_data import read, write_shards
from vlm_stream.chaos import Fault
from vlm_stream.storage import ShardKey, SpanReader, StoreOptions
from vlm_stream.storage import cache as cache_module
from vlm_stream.storage.cache import NodeCache, NoRoomError

SPAWN = multiprocessing.get_context("spawn")


def key_of(name: str, size: int = 1000) -> ShardKey:
    return ShardKey("s3://bucket", name, size, None)


def filler(byte: bytes, size: int = 1000):
    return lambda descriptor: os.pwrite(descriptor, byte * size, 0)


def no_download(descriptor: int) -> None:
    raise AssertionError("downloaded twice")


def test_a_shard_is_downloaded_once_and_found_again(tmp_path):
    cache = NodeCache(str(tmp_path), 10**6)
    assert cache.find(key_of("a")) is None
    shard, downloaded = cache.obtain(key_of("a"), filler(b"a"), time.sleep)
    assert (downloaded, shard.read(990, 100)) == (True, b"a" * 10)
    shard.close()
    again, downloaded = NodeCache(str(tmp_path), 10**6).obtain(key_of("a"), no_download, time.sleep)
    assert (downloaded, again.read(0, 5)) == (False, b"aaaaa")
    again.close()


def test_the_least_recently_used_goes_first_and_what_is_read_stays(tmp_path):
    cache = NodeCache(str(tmp_path), 3300, min_idle_s=0)
    for position, name in enumerate("abc"):
        shard, _ = cache.obtain(key_of(name), filler(name.encode()), time.sleep)
        shard.close()
        os.utime(cache._file(key_of(name), "shard"), (position, position))
    held = cache.find(key_of("b"))
    os.utime(cache._file(key_of("b"), "shard"), (0, 0))
    cache.obtain(key_of("d"), filler(b"d"), time.sleep)[0].close()
    assert cache.find(key_of("a")) is None
    assert held.read(0, 3) == b"bbb"
    for name in "bcd":
        cache.find(key_of(name)).close()
    held.close()


def test_shards_in_recent_use_are_not_thrown_out_for_others(tmp_path):
    cache = NodeCache(str(tmp_path), 1500)
    cache.obtain(key_of("a"), filler(b"a"), time.sleep)[0].close()
    with pytest.raises(NoRoomError, match="the shards in use fill cache_bytes = 1500"):
        cache.obtain(key_of("b"), filler(b"b"), time.sleep)
    with pytest.raises(NoRoomError, match="more than cache_bytes = 1500"):
        cache.obtain(key_of("c", 5000), filler(b"c", 5000), time.sleep)
    cache.find(key_of("a")).close()
    assert not list(tmp_path.rglob("*.part"))


def test_a_damaged_shard_that_goes_while_room_is_made_is_room(tmp_path, monkeypatch):
    cache = NodeCache(str(tmp_path), 2200, min_idle_s=0)
    for name in "ab":
        cache.obtain(key_of(name), filler(name.encode()), time.sleep)[0].close()
    entries = list(cache._entries())
    monkeypatch.setattr(cache, "_entries", lambda: entries)
    cache.discard(key_of("a"))
    cache.discard(key_of("b"))
    cache.obtain(key_of("c"), filler(b"c"), time.sleep)[0].close()


def test_a_download_that_ends_while_another_counts_is_counted(tmp_path):
    """Whatever the moment of its renaming, one shard of four is in the cache when one fits."""
    for attempt in range(100):
        cache = NodeCache(str(tmp_path / str(attempt)), 1500)
        with ThreadPoolExecutor(4) as threads:
            obtained = [threads.submit(cache.obtain, key_of(name), filler(b"x"), time.sleep) for name in "abcd"]
        kept = [future.result()[0] for future in obtained if future.exception() is None]
        assert len(kept) == 1
        assert all(isinstance(future.exception(), NoRoomError | None) for future in obtained)
        kept[0].close()


def test_files_of_others_are_neither_served_counted_nor_deleted(tmp_path):
    cache = NodeCache(str(tmp_path), 2200, min_idle_s=0)
    folder = cache._folder
    folder.mkdir()
    foreign = [tmp_path / "mine.shard", folder / "notes.txt", folder / ("0" * 64 + ".shard"), folder / "x.part"]
    for path in foreign:
        path.write_bytes(b"precious")
    lookalike = cache._file(key_of("a"), "shard")
    lookalike.write_bytes(b"z" * 1056)
    foreign.append(lookalike)
    for path in foreign:
        os.utime(path, (0, 0))
    assert cache.find(key_of("a")) is None
    cache.obtain(key_of("b"), filler(b"b"), time.sleep)[0].close()
    with pytest.raises(NoRoomError, match="cache_bytes"):
        cache.obtain(key_of("c", 2000), filler(b"c", 2000), time.sleep)
    assert all(path.exists() for path in foreign)


def test_a_part_of_a_dead_writer_is_started_over(tmp_path):
    cache = NodeCache(str(tmp_path), 10**6)
    cache._folder.mkdir()
    cache._file(key_of("a"), "part").write_bytes(b"half")
    cache._file(key_of("b"), "part").write_bytes(b"half of another")
    shard, downloaded = cache.obtain(key_of("a"), filler(b"a"), time.sleep)
    assert downloaded
    assert shard.read(0, 1000) == b"a" * 1000
    shard.close()
    assert not list(tmp_path.rglob("*.part"))


def test_a_writer_that_stopped_writing_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "_STALLED_S", 1.0)
    cache = NodeCache(str(tmp_path), 10**6)
    cache._folder.mkdir()
    part = cache._file(key_of("a"), "part")
    with part.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        os.utime(part, (0, 0))
        with pytest.raises(NoRoomError, match="has not written for 1 s"):
            cache.obtain(key_of("a"), no_download, time.sleep)


def test_a_failed_download_leaves_nothing(tmp_path):
    cache = NodeCache(str(tmp_path), 10**6)

    def broken(_descriptor):
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        cache.obtain(key_of("a"), broken, time.sleep)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


def read_with_cache(shards, folder, options, max_bytes=10**9):
    with SpanReader(cache_options(folder, max_bytes), store_options=options) as reader:
        for tag, result in read(reader, shards.order()):
            shards.assert_equal(tag, result)
        return reader.metrics


def test_a_second_epoch_asks_the_store_for_nothing(s3_shards, proxy, tmp_path):
    options = StoreOptions(endpoint=proxy.endpoint, region="us-east-1", allow_http=True)
    first = read_with_cache(s3_shards, tmp_path, options)
    assert first.cache_downloads == 3
    num_requests = proxy.seen.total()
    second = read_with_cache(s3_shards, tmp_path, options)
    assert (second.requests, second.cache_downloads) == (0, 0)
    assert second.cache_hits > 0
    assert proxy.seen.total() == num_requests


def test_one_thread_of_a_reader_brings_shards_ahead(s3_shards, s3_server, tmp_path, monkeypatch):
    class SlowToBeMade(threading.Thread):
        def __init__(self, *args, name=None, **options):
            if name == "vlm-stream-ahead":
                time.sleep(0.2)  # long enough for the other threads to come to the same place
            super().__init__(*args, name=name, **options)

    def bringing():
        return [thread for thread in threading.enumerate() if thread.name == "vlm-stream-ahead"]

    monkeypatch.setattr(threading, "Thread", SlowToBeMade)
    with SpanReader(cache_options(tmp_path), store_options=s3_server.options) as reader:
        read(reader, s3_shards.order())
        assert len(bringing()) == 1
    assert not bringing()


def _read_in_process(shards, folder, options, out):
    try:
        out.put(read_with_cache(shards, folder, options).cache_downloads)
    except BaseException as error:
        out.put(error)
        raise


def test_many_processes_download_each_shard_once(s3_shards, s3_server, tmp_path):
    out = SPAWN.Queue()
    children = [
        SPAWN.Process(target=_read_in_process, args=(s3_shards, tmp_path, s3_server.options, out)) for _ in range(3)
    ]
    for child in children:
        child.start()
    counts = [out.get(timeout=240) for _ in children]
    for child in children:
        child.join(60)
    assert sum(counts) == 3


def test_damage_in_the_cache_is_found_mended_and_never_served(s3_shards, s3_server, tmp_path):
    read_with_cache(s3_shards, tmp_path, s3_server.options)
    span = s3_shards.spans[0]
    for path in cached_files(tmp_path):
        blob = bytearray(path.read_bytes())
        blob[span.offset + 100] ^= 1
        path.write_bytes(blob)
    totals = read_with_cache(s3_shards, tmp_path, s3_server.options)
    assert totals.rereads >= 3
    assert totals.bad_samples == 0
    assert len(cached_files(tmp_path)) <= 3
    read_with_cache(s3_shards, tmp_path, s3_server.options)
    assert read_with_cache(s3_shards, tmp_path, s3_server.options).rereads == 0


def test_a_flipped_byte_during_the_download_is_not_served(s3_shards, proxy, tmp_path):
    proxy.faults = [Fault("flip", at=1000)]
    options = StoreOptions(endpoint=proxy.endpoint, region="us-east-1", allow_http=True)
    assert read_with_cache(s3_shards, tmp_path, options).bad_samples == 0


def test_a_cache_that_is_too_small_serves_what_fits(s3_shards, s3_server, tmp_path, caplog):
    size = s3_shards.spans[0].shard_size
    with caplog.at_level(logging.WARNING):
        totals = read_with_cache(s3_shards, tmp_path, s3_server.options, max_bytes=int(size * 1.5))
    assert totals.cache_downloads == 1
    assert sum(path.stat().st_size for path in cached_files(tmp_path)) <= size * 1.5
    assert len(caplog.records) == 1
    assert "raise cache_bytes" in caplog.text


def test_a_full_cache_is_not_searched_for_room_at_every_read(s3_shards, s3_server, tmp_path, monkeypatch):
    monkeypatch.setattr("vlm_stream.storage.downloads._FULL_S", 1e9)
    searches, make_room = [], NodeCache._make_room
    monkeypatch.setattr(NodeCache, "_make_room", lambda *given: searches.append(given) or make_room(*given))
    size = s3_shards.spans[0].shard_size
    with SpanReader(cache_options(tmp_path, int(size * 1.5)), store_options=s3_server.options) as reader:
        for number in (0, 20, 21, 40, 41, 1):  # three shards
            ((tag, result),) = read(reader, [(number, s3_shards.spans[number])])
            s3_shards.assert_equal(tag, result)
        assert (reader.metrics.cache_downloads, reader.metrics.cache_hits) == (1, 1)
    assert len(searches) == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_at_the_wrong_moment_leaves_nothing_locked(tmp_path):
    cache = NodeCache(tmp_path, 10_000)
    cache.obtain(key_of("a"), filler(b"a"), time.sleep)[0].close()
    with cache._locked_folder():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            shard, _ = pool.submit(cache.obtain, key_of("b"), filler(b"b"), time.sleep).result(timeout=240)
        assert shard.read(0, 3) == b"bbb"
        shard.close()
    finally:
        child.kill()
        child.join()


def _read_on_a_full_disk(shards, folder, options, out):
    # The kernel refuses to grow files beyond this: the error of a full disk, without filling one.
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("vlm_stream").addHandler(handler)
    totals = read_with_cache(shards, folder, options)
    out.put((totals.samples, totals.bad_samples, records))


def test_a_full_disk_means_no_cache_and_one_warning(s3_shards, s3_server, tmp_path):
    out = SPAWN.SimpleQueue()
    child = SPAWN.Process(target=_read_on_a_full_disk, args=(s3_shards, tmp_path, s3_server.options, out))
    child.start()
    samples, bad, warnings = out.get()
    child.join(60)
    assert (samples, bad) == (60, 0)
    assert len(warnings) == 1
    assert "The node cache goes on without some shards: File too large" in warnings[0]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]


def test_kill_9_at_any_moment_leaves_the_cache_usable(s3_server, proxy, tmp_path, request):
    url = s3_server.url(request.node.name)
    shards = write_shards(url, num_shards=6, num_samples=10, size=40_000, options=s3_server.options)
    proxy.faults = lambda *_: Fault("slow", seconds=0.0003)
    options = StoreOptions(endpoint=proxy.endpoint, region="us-east-1", allow_http=True)
    num_parts_left = kill_during_fill(shards, tmp_path, options, num_kills=8)
    assert num_parts_left > 0  # some kills did come in the middle of a download
    proxy.faults = []
    read_with_cache(shards, tmp_path, options)


def test_a_clock_that_was_set_back_keeps_no_shard_for_ever(tmp_path):
    cache = NodeCache(str(tmp_path), 1500)
    cache.obtain(key_of("a"), filler(b"a"), time.sleep)[0].close()
    tomorrow = time.time() + 86_400
    os.utime(cache._file(key_of("a"), "shard"), (tomorrow, tomorrow))
    shard, downloaded = cache.obtain(key_of("b"), filler(b"b"), time.sleep)
    shard.close()
    assert downloaded


@pytest.mark.parametrize("jump_s", [-86_400, 86_400])
def test_a_clock_that_jumps_does_not_make_a_writer_look_dead_or_alive(tmp_path, monkeypatch, jump_s):
    """Who waits counts by a clock that cannot jump how long the file has not changed."""
    now = 0.0
    monkeypatch.setattr(cache_module, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    cache = NodeCache(str(tmp_path), 10**6)
    cache._folder.mkdir()
    part = cache._file(key_of("a"), "part")
    begin = time.time() + jump_s
    written = []

    def wait(_seconds):
        nonlocal now
        now += cache_module._STALLED_S / 10
        if len(written) < 30:  # the other one writes for a while
            written.append(begin + len(written))
            os.utime(part, (written[-1], written[-1]))

    with part.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(NoRoomError, match="has not written for"):
            cache.obtain(key_of("a"), no_download, wait)
    assert len(written) == 30
