"""Text of datasets is hostile in every field: also in names of files, sources and keys, ledgers and batches."""

from __future__ import annotations

import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from tests.view.conftest import EVIL, open_viewer
from tests.view.test_pages import Reader, links_of, page_of, sample_link
from vlm_stream import StreamLoader
from vlm_stream.cli import main
from vlm_stream.convert import make_shards
from vlm_stream.testing import make_jpeg
from vlm_stream.view.facts import Query
from vlm_stream.view.server import make_app

if TYPE_CHECKING:
    from pathlib import Path

NAME = "<img src=x onerror=alert(1)>\"'&"
"""What a file may be called."""


def is_harmless(page: Reader, *, scripts: int = 1) -> None:
    assert page.tags.count("script") == scripts
    assert not [each for each in page.attributes if each[1].startswith("on")]
    assert not [each for each in page.attributes if each[2] == "x"]


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tars of others, whose names, keys and members are markup."""
    folder = tmp_path_factory.mktemp("foreign")
    for number in range(2):
        with tarfile.open(folder / f"{NAME}{number}.tar", "w") as tar:
            for key in range(3):
                members = {"jpg": make_jpeg(30, 40), "txt": EVIL.encode(), f"{NAME}.bin": b"1"}
                for member, data in members.items():
                    info = tarfile.TarInfo(f"{NAME}{number}-{key}.{member}".replace("/", ""))
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return folder


def test_names_of_tars_keys_members_and_sources_are_text(tars: Path, processor: Any) -> None:
    viewer = open_viewer({NAME: {"url": str(tars)}}, processor)
    client = TestClient(make_app(viewer))
    dataset = page_of(client, "/dataset")
    is_harmless(dataset)
    assert NAME in "".join(dataset.words)
    assert len(links_of(dataset, "/sample?")) == 6
    for place in range(6):
        page = page_of(client, sample_link(viewer, viewer.catalog.ref_at(place)))
        is_harmless(page)
        assert NAME in "".join(page.words)
        for link in links_of(page, "/member?") + links_of(page, "/picture?"):
            assert client.get(link).status_code == 200
    for path in ("/step", "/step?build=1", "/compare?window_b=2"):
        is_harmless(page_of(client, path))
    viewer.close()


def test_a_batch_a_live_ledger_and_statistics_are_text(
    evil_shards: Path, saved_processor: Path, processor: Any, tmp_path: Path
) -> None:
    page = tmp_path / "stats.html"
    assert main(["stats", str(evil_shards), "--processor", str(saved_processor), "--html", str(page)]) == 0
    stats = Reader(page.read_text(encoding="utf-8"))
    is_harmless(stats, scripts=0)
    assert "<script>alert" in "".join(stats.words)  # the entry's name
    more: dict[str, Any] = {"pack_size": 512, "with_refs": True, "bad_budget": None, "num_workers": 0}
    loader = StreamLoader({NAME: str(_damaged(tmp_path, saved_processor))}, processor=processor, **more)
    with loader, loader.serve_view() as running:
        batches = list(loader)
        assert loader.ledger.num_bad
        run = page_of(TestClient(make_app(running.viewer)), "/run")
        is_harmless(run)
        assert NAME in "".join(run.words)
        shown = Reader(loader.show(batches[0]).html)
        is_harmless(shown, scripts=0)
        assert EVIL[:20] in "".join(shown.words)


def _damaged(folder: Path, processor: Path) -> Path:
    """Return shards with texts of markup, some of whose samples are bad."""
    (folder / "a.jpg").write_bytes(make_jpeg(56, 56))
    records = [
        {
            "id": f"{EVIL}{number}",
            "messages": [{"role": "user", "content": f"<image>{EVIL}"}, {"role": "assistant", "content": EVIL}],
            "images": [str(folder / "a.jpg")],
        }
        for number in range(4)
    ]
    (folder / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    make_shards(folder / "own.jsonl", folder / "own", processor=str(processor))
    viewer = open_viewer(folder / "own")
    (drawn,) = viewer.catalog.draw(viewer.catalog.page(Query(), 0, 1).refs)
    viewer.close()
    with (folder / "own" / drawn.span.path).open("r+b") as tar:
        tar.seek(drawn.span.offset)
        tar.write(b"\x00" * drawn.span.size)
    return folder / "own"
