from __future__ import annotations

import multiprocessing
import os
import pickle
import stat
from pathlib import Path

import pytest

from tests.waiting import wait_for
from vlm_stream.errors import AccessError, ConfigError, NotFoundError, StorageError
from vlm_stream.storage import Store, local, open_store


def test_put_get_ranges_head_list_delete(tmp_path):
    store = open_store(str(tmp_path / "data"))
    assert isinstance(store, Store)
    store.put("a/b.bin", b"0123456789")
    assert store.get("a/b.bin") == b"0123456789"
    ranges = store.get_ranges("a/b.bin", [(2, 3), (8, 100), (0, 0), (100, 3)])
    assert [bytes(each) for each in ranges] == [b"234", b"89", b"", b""]
    (tmp_path / "file").write_bytes(b"from a file")
    for path, data in (("c", b"1"), ("d", b"22"), ("e", tmp_path / "file")):
        store.put(path, data)
    assert [(info.path, info.size) for info in store.list()] == [("a/b.bin", 10), ("c", 1), ("d", 2), ("e", 11)]
    assert [info.path for info in store.list("a/")] == ["a/b.bin"]
    assert store.head("d").size == 2
    store.put("d", b"replaced")
    assert bytes(store.get_ranges("d", [(0, 100)])[0]) == b"replaced"
    store.delete("d")
    for call in (store.get, store.head, store.delete, lambda path: store.get_ranges(path, [(0, 1)])):
        with pytest.raises(NotFoundError, match=r"There is no file .*/d"):
            call("d")
    assert pickle.loads(pickle.dumps(store)).get("c") == b"1"


def test_written_files_have_the_usual_mode(tmp_path):
    open_store(str(tmp_path)).put("x", b"1")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o666 & ~mask


def test_a_failed_write_leaves_the_old_object_and_no_litter(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    store.put("x", b"old")

    def refuse(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local.os, "fsync", refuse)
    with pytest.raises(StorageError, match=r"No space left on device\. Free some space"):
        store.put("x", b"new")
    assert store.get("x") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def _write_for_ever(folder):
    store = open_store(folder)
    while True:
        for byte in (b"a", b"b"):
            store.put("x", byte * 300_000)


def test_kill_9_during_writes_leaves_a_whole_object(tmp_path):
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_write_for_ever, args=(str(tmp_path),))
    child.start()
    wait_for((tmp_path / "x").exists)
    store = open_store(str(tmp_path))
    for _ in range(50):
        assert store.get("x") in (b"a" * 300_000, b"b" * 300_000)
    child.kill()
    child.join()
    assert store.get("x") in (b"a" * 300_000, b"b" * 300_000)
    assert [info.path for info in store.list()] == ["x"]


def test_a_folder_in_the_way_is_an_error_that_says_so(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(StorageError, match="x could not be read or written: Is a directory"):
        open_store(str(tmp_path)).get("x")


def test_a_file_in_the_place_of_a_folder_is_nothing_found(tmp_path):
    (tmp_path / "x").write_bytes(b"1")
    with pytest.raises(NotFoundError, match=r"There is no .*x/y, because a part of that path is a file"):
        open_store(str(tmp_path / "x")).get("y")


def test_links_that_lead_nowhere_are_no_objects(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to("gone")
    assert [info.path for info in open_store(str(tmp_path)).list()] == ["a"]


def test_an_empty_text_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store(".").root == str(tmp_path)
    with pytest.raises(ConfigError, match="an empty text names no file and no folder"):
        open_store("")


def test_no_permission(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(local, "FileIO", refuse)  # a superuser may read everything, so the refusal is made up
    with pytest.raises(AccessError, match="may not be opened by this user"):
        open_store(str(tmp_path)).get("x")


def test_files_do_not_stay_open(tmp_path):
    store = open_store(str(tmp_path))
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"x")
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for number in range(20):
        store.get_ranges(str(number), [(0, 1)])
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before
