"""Fixtures for every room."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.servers import S3Server
from tests.waiting import WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator


# Workers are forked from a server that has imported what most tests need, whichever test comes first in a process.
multiprocessing.set_forkserver_preload(
    [
        "vlm_stream.build",
        "vlm_stream.dispatch",
        "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
        "transformers.models.qwen2_vl.image_processing_qwen2_vl",
        "transformers.models.qwen2_vl.video_processing_qwen2_vl",
        "vlm_stream.testing",
    ]
)

settings.register_profile("vlm_stream", deadline=None)  # machines are noisy: no test is about time
settings.load_profile("vlm_stream")


LONGEST = ("service/", "end_to_end/", "stream/", "dispatch/", "test_loader", "integrations/", "tokens/", "convert/")
"""What takes long begins first, so that no process of a parallel run is left with it at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort files by how long they take; `make test` keeps this order (`--no-loadscope-reorder`)."""
    root = Path(__file__).parent.as_posix() + "/"

    def rank(item: pytest.Item) -> int:
        name = item.path.as_posix().removeprefix(root)
        return next((rank for rank, begin in enumerate(LONGEST) if name.startswith(begin)), len(LONGEST))

    items.sort(key=rank)


@pytest.fixture
def nothing_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody be doubted because a machine is busy, so that tests can count what is built, and who is lost."""
    monkeypatch.setattr("vlm_stream.dispatch.schedule.Schedule._is_over", lambda *_: False)
    monkeypatch.setattr("vlm_stream.dispatch.values.ScheduledBuilder.is_open", lambda self, _now: not self.is_retiring)
    monkeypatch.setattr("vlm_stream.dispatch.ray_board._ANSWER_S", WAIT_S)
    monkeypatch.setattr("vlm_stream.dispatch.ray_board._START_S", WAIT_S)


@pytest.fixture(scope="session")
def processor() -> Any:
    """A real Qwen2.5-VL processor whose size limits are small, so that tests are quick."""
    from vlm_stream.testing import build_processor

    limits = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 36 * 28 * 28}}
    return build_processor("qwen2_5_vl", image=limits, video=limits | {"cap_pixels_per_frame": False})


@pytest.fixture(scope="session")
def saved_processor(tmp_path_factory: pytest.TempPathFactory, processor: Any) -> Path:
    """That processor, saved."""
    folder = tmp_path_factory.mktemp("processor")
    processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def toy_meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A meta file over 60 conversations with images, videos and text."""
    from vlm_stream.testing import make_toy_dataset

    return make_toy_dataset(tmp_path_factory.mktemp("toy"), num_samples=60)


@pytest.fixture(scope="session")
def toy_shards(tmp_path_factory: pytest.TempPathFactory, toy_meta: Path, saved_processor: Path) -> Path:
    """Those conversations in 6 shards, counted exactly."""
    from vlm_stream.convert import make_shards

    folder = tmp_path_factory.mktemp("toy-shards")
    make_shards(toy_meta, folder, processor=str(saved_processor), samples_per_shard=10)
    return folder


@pytest.fixture(scope="session")
def mixed_shards(tmp_path_factory: pytest.TempPathFactory, toy_meta: Path, saved_processor: Path) -> Path:
    """Those conversations shuffled: each of 4 shards has samples of every entry of the meta file."""
    from vlm_stream.convert import make_shards

    folder = tmp_path_factory.mktemp("mixed-shards")
    make_shards(toy_meta, folder, processor=str(saved_processor), samples_per_shard=15, shuffle=3)
    return folder


@pytest.fixture(scope="session")
def image_shards(tmp_path_factory: pytest.TempPathFactory, toy_meta: Path) -> Path:
    """Those without videos, for families that read none; not counted for any processor."""
    from vlm_stream.convert import make_shards

    folder = tmp_path_factory.mktemp("image-shards")
    make_shards(toy_meta, folder, names=("captions", "dialogues"), samples_per_shard=10)
    return folder


@pytest.fixture(scope="session")
def running_s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """Start one S3 server for the whole run."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_server(running_s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """A real S3 server: `.url("folder")`, `.options` for `open_store`, and its keys in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in running_s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return running_s3_server
