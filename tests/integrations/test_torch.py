"""torch's own parallel training: the examples conform; checkpoints of torch.distributed hold the loader."""

import pytest

from vlm_stream.testing.conformance import check

pytestmark = pytest.mark.trainers


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_an_example_conforms(conformance_data, tmp_path, name):
    report = check(f"tests.integrations.torch_trainers:{name}", tmp_path, data=conformance_data)
    assert set(report.results.values()) == {"yes"}
