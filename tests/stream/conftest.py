import pytest

from vlm_stream.shards import make_shards
from vlm_stream.testing import build_processor, make_toy_dataset


@pytest.fixture(scope="session")
def processor():
    return build_processor("qwen2_5_vl")


@pytest.fixture(scope="session")
def toy_shards(tmp_path_factory, processor):
    """A dataset of 60 samples in 6 shards, counted exactly."""
    folder = tmp_path_factory.mktemp("toy")
    processor.save_pretrained(folder / "processor")
    meta = make_toy_dataset(folder / "raw", num_samples=60)
    make_shards(meta, folder / "shards", samples_per_shard=10)
    return folder / "shards"
