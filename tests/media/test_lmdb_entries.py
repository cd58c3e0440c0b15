"""`path::key` reads one entry of a real LMDB."""

from __future__ import annotations

import pytest

from vlm_stream.errors import BadSampleError, MissingExtraError
from vlm_stream.media import lmdb as lmdb_module
from vlm_stream.media import probe_image, read_lmdb
from vlm_stream.testing import make_jpeg

lmdb = pytest.importorskip("lmdb", reason="LMDB entries need the package lmdb")


@pytest.fixture
def database(tmp_path):
    path = tmp_path / "images"
    with lmdb.open(str(path), map_size=1 << 20) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"a::b", make_jpeg(12, 14))
        transaction.put(b"cat", make_jpeg(20, 30))
    return path


def test_entry_is_read_and_keys_may_hold_the_separator(database):
    assert probe_image(read_lmdb(f"{database}::cat")) == (20, 30)
    assert probe_image(read_lmdb(f"{database}::a::b")) == (12, 14)


def test_errors(database, tmp_path, monkeypatch):
    with pytest.raises(BadSampleError, match="holds no entry 'dog'") as caught:
        read_lmdb(f"{database}::dog")
    assert caught.value.reason == "missing_file"
    with pytest.raises(BadSampleError, match="cannot be opened"):
        read_lmdb(f"{tmp_path / 'nothing'}::cat")
    with pytest.raises(BadSampleError, match="does not name an LMDB entry"):
        read_lmdb("just/a/path")

    def without(name):
        raise ImportError(name)

    monkeypatch.setattr(lmdb_module, "import_module", without)
    with pytest.raises(MissingExtraError, match=r"vlm-stream\[lmdb\]"):
        read_lmdb(f"{database}::cat")
