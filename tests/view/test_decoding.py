"""What decoding costs ranks, as the plan balances it."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from tests.view.conftest import open_viewer
from vlm_stream.convert import make_shards
from vlm_stream.options import StreamOptions
from vlm_stream.plan import plan_report
from vlm_stream.view.server import make_app

if TYPE_CHECKING:
    from pathlib import Path

    from vlm_stream.view import Viewer

OPTIONS: dict[str, Any] = {"mode": "plain", "batch_size": 2, "micro_batches": 2, "max_frames": 4}


@pytest.fixture(scope="module")
def clip_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen clips of four lengths, long enough for tables."""
    if shutil.which("ffmpeg") is None:
        pytest.skip("ffmpeg is not installed")
    folder = tmp_path_factory.mktemp("clips")
    noise = "testsrc2=size=96x64:rate=25:duration={},noise=alls=30:allf=t:all_seed=1"
    for number in range(4):
        command = f"ffmpeg -loglevel error -nostdin -f lavfi -i {noise.format(12 + 6 * number)} -c:v libx264 -preset"
        command += f" veryfast -g {10 + 40 * number} -sc_threshold 0 -crf 12 -pix_fmt yuv420p {folder}/{number}.mp4"
        subprocess.run(command.split(), check=True, timeout=60)
    lines = [
        {
            "id": f"{number}",
            "conversation": [
                {"role": "user", "content": [{"type": "video", "video": f"{number % 4}.mp4"}]},
                {"role": "assistant", "content": [{"type": "text", "text": "A clip."}]},
            ],
        }
        for number in range(16)
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_shards(folder / "records.jsonl", folder / "shards", samples_per_shard=4, media_dir=str(folder), workers=1)
    return folder / "shards"


def views(viewer: Viewer) -> list[Any]:
    walk = viewer.book.walk(viewer.book.base)
    steps = plan_report(walk.plan.after(0).planner, walk.shape, max_steps=100).steps
    return [viewer.book.view(viewer.book.base, number, 1) for number in range(steps)]


def test_bars_of_decoding_are_what_the_plan_balances(clip_shards, processor):
    viewer = open_viewer(clip_shards, processor, options=StreamOptions(**OPTIONS, video_backend="av"), world=2)
    found = views(viewer)
    walk = viewer.book.walk(viewer.book.base)
    report = plan_report(walk.plan.after(0).planner, walk.shape, max_steps=len(found))
    ratios = [max(view.decode) / (sum(view.decode) / 2) for view in found]
    assert all(view.is_decode_planned for view in found)
    assert sum(ratios) / len(ratios) == pytest.approx(report.decode_imbalance_step)
    assert ratios != [1.0] * len(ratios)  # or any sum would be as good
    for view in found:
        for rows in view.micro_batches:
            assert all(each.decode > 0 for row in rows for each in row.documents)
        documents = [each for rows in view.micro_batches for row in rows for each in row.documents]
        assert sum(each.decode for each in documents) == pytest.approx(view.decode[1])
    assert "Decoding clips, MP" in TestClient(make_app(viewer)).get("/step?step=0").text


def test_a_step_without_clips_shows_the_pixels_of_its_images(image_shards, processor):
    viewer = open_viewer(image_shards, processor, options=StreamOptions(**OPTIONS), world=2)
    for view in views(viewer):
        documents = [each for rows in view.micro_batches for row in rows for each in row.documents]
        sizes = [each.sizes for each in viewer.catalog.draw([document.ref for document in documents])]
        pixels = sum(image.height * image.width for own in sizes for image in own.images)
        assert not view.is_decode_planned
        assert view.decode[1] == pytest.approx(pixels / 1e6) == pytest.approx(sum(each.decode for each in documents))
    assert "Pixels of images, MP" in TestClient(make_app(viewer)).get("/step?step=0").text


def test_decoding_is_shown_where_ranks_wait_and_for_each_part_of_a_pipeline(clip_shards, processor):
    options = StreamOptions(**OPTIONS, video_backend="av", barrier="micro", pp_microbatches=2)
    viewer = open_viewer(clip_shards, processor, options=options, world=2)
    view = viewer.book.view(viewer.book.base, 0, 1)
    assert [sum(micro[2][rank] for micro in view.by_micro) for rank in (0, 1)] == pytest.approx(list(view.decode))
    text = TestClient(make_app(viewer)).get("/step?step=0").text
    assert text.count("<b>Decoding clips, MP, ranks in this micro-batch</b>") == 2
    assert text.count("<b>Decoding clips, MP, the pipeline&#x27;s micro-batches</b>") == 2
