import pytest

from vlm_stream.shards import make_shards
from vlm_stream.testing import build_processor, make_toy_dataset


@pytest.fixture(scope="session")
def processor():
    """A real Qwen2.5-VL processor whose size limits are small, so that tests are quick."""
    limits = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 36 * 28 * 28}}
    return build_processor("qwen2_5_vl", image=limits, video=limits | {"cap_pixels_per_frame": False})


@pytest.fixture(scope="session")
def toy_shards(tmp_path_factory, processor):
    """A dataset of 60 samples in 6 shards, counted exactly."""
    folder = tmp_path_factory.mktemp("toy")
    processor.save_pretrained(folder / "processor")
    meta = make_toy_dataset(folder / "raw", num_samples=60)
    make_shards(meta, folder / "shards", processor=str(folder / "processor"), samples_per_shard=10)
    return folder / "shards"
