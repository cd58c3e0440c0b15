"""From files to records: meta files, bare files, compression, other processes, and everything that is broken."""

from __future__ import annotations

import gzip
import http.server
import json
import multiprocessing
import pickle
import random
import tempfile
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from vlm_stream.errors import SourceError
from vlm_stream.sources import SourceGroup, open_source, rank_share, sample_order
from vlm_stream.storage import RetryOptions, StoreOptions

if TYPE_CHECKING:
    from pathlib import Path


def sample(name: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": name}, {"role": "assistant", "content": "A"}], **more}


def samples(num: int) -> list[dict[str, Any]]:
    return [sample(f"Q{i}") for i in range(num)]


def lines(values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def questions(source: SourceGroup) -> list[str]:
    return [source.read(i).conversation[0]["content"][0]["text"] for i in range(len(source))]


def write_meta(folder: Path, **entries: Any) -> str:
    path = folder / "meta.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return str(path)


def test_meta_file_with_three_datasets(tmp_path: Path):
    (tmp_path / "b.jsonl").write_text("\n" + lines([sample("B0", id="own"), sample("B1", id=7)]), encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(samples(3), indent=2), encoding="utf-8")
    (tmp_path / "sub").mkdir()
    turns = [{"from": "human", "value": "<image>C0 é漢"}, {"from": "gpt", "value": "x"}]
    (tmp_path / "sub" / "c.json").write_text(
        json.dumps([{"conversations": turns, "images": "1.jpg"}], ensure_ascii=False), encoding="utf-8"
    )
    tags = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
    meta = write_meta(
        tmp_path,
        zeta={"file_name": "b.jsonl"},
        alpha={"file_name": str(tmp_path / "a.json"), "media_dir": "/data"},
        chat={"file_name": "sub/c.json", "media_dir": "pics", "columns": {"messages": "conversations"}, "tags": tags},
    )
    source = open_source(meta)
    assert source.counts == {"alpha": 3, "chat": 1, "zeta": 2}
    assert len(source) == 6
    records = [source.read(i) for i in range(6)]
    assert [r.source for r in records] == ["alpha"] * 3 + ["chat"] + ["zeta"] * 2
    assert [r.id for r in records] == ["0", "1", "2", "0", "own", "7"]
    assert records[0].media_root == "/data"
    assert records[0].origin == f"{tmp_path}/a.json[0]"
    assert records[3].conversation[0]["content"] == [
        {"type": "image", "image": f"{tmp_path}/pics/1.jpg"},
        {"type": "text", "text": "C0 é漢"},
    ]
    assert records[3].media_root == f"{tmp_path}/pics"
    assert records[4].origin == f"{tmp_path}/b.jsonl:2 (id own)"
    assert open_source(meta, names=["zeta", "alpha"]).counts == {"alpha": 3, "zeta": 2}
    with pytest.raises(IndexError, match="record 6 of source 'meta', which has 6"):
        source.read(6)


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("packing", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".ndjson"])
def test_bare_files(tmp_path: Path, suffix: str, packing: str, bom: bytes):
    plain = bom + (json.dumps(samples(50)) if suffix == ".json" else lines(samples(50))).encode()
    half = len(plain) // 2
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[packing]
    path = tmp_path / f"data{suffix}{packing}"
    path.write_bytes(pack(plain[:half]) + pack(plain[half:]))  # several members or frames are one file
    source = open_source(str(path))
    assert source.counts == {"data": 50}
    assert questions(source) == [f"Q{i}" for i in range(50)]


def test_json_lines_in_a_file_called_json(tmp_path: Path):
    (tmp_path / "a.json").write_text(lines(samples(3)))
    assert questions(open_source(str(tmp_path / "a.json"))) == ["Q0", "Q1", "Q2"]


def test_bare_file_with_its_form(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(lines([{"c": [{"role": "human", "content": "<image>"}], "images": ["x.jpg"]}]))
    source = open_source(
        str(tmp_path / "a.jsonl"), columns={"messages": "c"}, tags={"user_tag": "human"}, media_dir="s3://b"
    )
    assert source.read(0).conversation[0]["content"] == [{"type": "image", "image": "s3://b/x.jpg"}]


def test_paths_mean_the_same_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.jsonl").write_text(lines([sample("<image>Q", images=["1.jpg"])]))
    write_meta(tmp_path, a={"file_name": "a.jsonl", "media_dir": "m"})
    monkeypatch.chdir(tmp_path)
    copies = [pickle.dumps(open_source("meta.json")), pickle.dumps(open_source("a.jsonl", media_dir="m"))]
    monkeypatch.chdir("/")
    for copy in copies:
        record = pickle.loads(copy).read(0)
        assert record.origin == "a.jsonl:1"
        assert record.conversation[0]["content"][0] == {"type": "image", "image": f"{tmp_path}/m/1.jpg"}
        assert record.media_root == f"{tmp_path}/m"


def test_the_spill_goes_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(samples(3)).encode()))
    spill = tmp_path / "spill"
    spill.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spill))
    source = open_source(str(tmp_path / "a.jsonl.gz"))
    assert len(list(spill.iterdir())) == 1
    copy = pickle.loads(pickle.dumps(source))
    assert questions(copy) == ["Q0", "Q1", "Q2"]
    data = pickle.dumps(source)
    del source
    assert not list(spill.iterdir())
    far_away = pickle.loads(data)  # the first spill is gone, as on another machine: it makes its own
    assert questions(far_away) == ["Q0", "Q1", "Q2"]
    assert len(list(spill.iterdir())) == 1
    del far_away
    assert not list(spill.iterdir())


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_sources_work_in_other_processes(tmp_path: Path, method: str):
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps(samples(20)).encode()))
    source = open_source(str(tmp_path / "a.json.gz"))
    with multiprocessing.get_context(method).Pool(2) as pool:
        records = pool.map(source.read, range(20))
    assert [r.conversation[0]["content"][0]["text"] for r in records] == [f"Q{i}" for i in range(20)]
    assert questions(source) == [f"Q{i}" for i in range(20)]  # the workers did not take the spill with them


def test_urls(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(lines([sample("<image>Q0", images=["1.jpg"])]))
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(samples(2)).encode()))
    write_meta(tmp_path, a={"file_name": "a.jsonl", "media_dir": "m"}, b={"file_name": "b.json.gz"})
    handler = partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            root = f"http://127.0.0.1:{server.server_address[1]}"
            source = open_source(f"{root}/meta.json")
            assert source.counts == {"a": 1, "b": 2}
            assert source.read(0).conversation[0]["content"][0] == {"type": "image", "image": f"{root}/m/1.jpg"}
            assert source.read(2).conversation[0]["content"][0]["text"] == "Q1"
            with pytest.raises(SourceError, match=r"none\.jsonl: cannot be fetched .* Check the URL"):
                open_source(f"{root}/none.jsonl")
        finally:
            server.shutdown()
            thread.join()
    assert open_source(f"file://{tmp_path}/a.jsonl").counts == {"a": 1}


def test_a_download_that_breaks_off():
    class Breaking(_Quiet):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.send_header("Last-Modified", self.date_time_string(0))
            self.end_headers()
            self.wfile.write(b'{"messages": []}')
            self.close_connection = True

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Breaking) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            impatient = StoreOptions(retry=RetryOptions(max_retries=1, backoff_s=0.01, max_backoff_s=0.01))
            with pytest.raises(SourceError, match=r"a\.jsonl: cannot be fetched .* or copy the file first"):
                open_source(f"http://127.0.0.1:{server.server_address[1]}/a.jsonl", store=impatient)
        finally:
            server.shutdown()
            thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


# --- ratios and shares ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "order"),
    [
        (0.5, [1, 0, 4, 9, 6]),
        (0.6, [1, 0, 4, 9, 6, 5]),
        (1.5, [*range(10), 1, 0, 4, 9, 6]),
        (2.0, [*range(10), *range(10)]),
        (0.01, [1]),
    ],
)
def test_sample_ratio(tmp_path: Path, ratio: float, order: list[int]):
    for name, content in (("a.jsonl", lines(samples(10))), ("a.json", json.dumps(samples(10)))):
        (tmp_path / name).write_text(content)
        source = open_source(write_meta(tmp_path, a={"file_name": name, "sample_ratio": ratio}))
        assert questions(source) == [f"Q{i}" for i in order]


@pytest.mark.parametrize("num_records", [1, 7, 1000])
@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.99, 1.0, 1.1, 3.3])
def test_sample_order_is_the_reference_draw(num_records: int, ratio: float):
    order = sample_order(num_records, ratio)
    if ratio == 1:
        assert order is None
        return
    assert order is not None
    repeats, rest = int(ratio), ratio - int(ratio)
    num_drawn = int(num_records * rest) if repeats else max(1, int(num_records * ratio))
    drawn = random.Random(42).sample(range(num_records), num_drawn)
    assert order.tolist() == list(range(num_records)) * repeats + drawn


def test_entries_that_share_a_file(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(lines(samples(10)))
    meta = write_meta(
        tmp_path, half={"file_name": "a.jsonl", "sample_ratio": 0.5}, whole={"file_name": "a.jsonl", "media_dir": "m"}
    )
    assert open_source(meta).counts == {"half": 5, "whole": 10}


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shares_are_disjoint_and_complete(world_size: int):
    orders = [None, sample_order(7, 0.5), sample_order(11, 2.5), None]
    sizes = [10, 3, 27, 1]
    totals = np.zeros(world_size, int)
    begin = 0
    for order, size in zip(orders, sizes, strict=True):
        shares = [rank_share(order, size, rank, world_size, begin) for rank in range(world_size)]
        everything = np.arange(size) if order is None else order
        assert sorted(np.concatenate(shares).tolist()) == sorted(everything.tolist())
        totals += [len(share) for share in shares]
        begin += size
    assert totals.max() - totals.min() <= 1
    assert totals.sum() == sum(sizes)


def test_braces_and_joins_name_files(tmp_path: Path):
    for name in ("x-0", "x-1", "y"):
        (tmp_path / f"{name}.jsonl").write_text(lines([sample(name)]))
    assert questions(open_source(f"{tmp_path}/x-{{0..1}}.jsonl")) == ["x-0", "x-1"]
    assert questions(open_source(f"{tmp_path}/x-{{0..1}}.jsonl::{tmp_path}/y.jsonl")) == ["x-0", "x-1", "y"]
    assert open_source(f"{tmp_path}/y.jsonl::{tmp_path}/x-0.jsonl").counts == {"x-0": 1, "y": 1}
    for part in range(2):
        rows = pa.Table.from_pylist([sample(f"row {part}")])
        pq.write_table(rows, tmp_path / f"train-0000{part}-of-00002.parquet")
    assert open_source(f"{tmp_path}/train-0000{{0..1}}-of-00002.parquet").counts == {"train": 2}
    for named in ("train-0000{0..1}-of-00002.parquet", "train-00000-of-00002.parquet::train-00001-of-00002.parquet"):
        assert questions(open_source(write_meta(tmp_path, rows={"file_name": named}))) == ["row 0", "row 1"]
    (tmp_path / "own{0..1}.jsonl").write_text(lines([sample("its own name")]))
    assert questions(open_source(f"{tmp_path}/own{{0..1}}.jsonl")) == ["its own name"]
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "y.jsonl").write_text(lines([sample("other")]))
    with pytest.raises(SourceError, match=r"have the same name; convert them one by one"):
        open_source(f"{tmp_path}/y.jsonl::{tmp_path}/sub/y.jsonl")
    with pytest.raises(SourceError, match="has a brace without its pair"):
        open_source(f"{tmp_path}/x-{{0..")
    with pytest.raises(SourceError, match=r"stands for more names than any dataset has.*Nothing was read"):
        open_source(f"{tmp_path}/x-{{0..99999999999}}.jsonl")
    with pytest.raises(SourceError, match=r"x-2\.jsonl: cannot be opened"):
        open_source(f"{tmp_path}/x-{{1..2}}.jsonl")


@pytest.mark.parametrize("name", ["x.tar", "x-{0..1}.tar", "a.tar::b.tar", "x.tar.gz", "s3://bucket/x-{0..1}.tar"])
def test_tars_are_used_in_place(tmp_path: Path, name: str):
    place = name if "://" in name else f"{tmp_path}/{name}"
    with pytest.raises(SourceError, match=r"a tar needs no conversion.*StreamLoader.*vlm-stream index '"):
        open_source(place)


def test_folders_of_tars_are_used_in_place(tmp_path: Path):
    (tmp_path / "x.tar").write_bytes(b"")
    (tmp_path / "x.index.parquet").write_bytes(b"")
    with pytest.raises(SourceError, match=r"Its tars need no conversion: vlm-stream index '"):
        open_source(str(tmp_path))


def test_a_query_is_no_pattern():
    with pytest.raises(SourceError, match=r"a web address with a query cannot be read\. Leave it out, or fetch"):
        open_source("https://127.0.0.1:9/data.jsonl?download=true")
