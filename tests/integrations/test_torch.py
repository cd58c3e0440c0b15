"""torch's own parallel training: the examples conform; checkpoints of torch.distributed hold the loader."""

from vlm_stream.testing.conformance import check


def test_ddp_conforms(tmp_path):
    report = check("tests.integrations.torch_trainers:ddp", tmp_path)
    assert set(report.results.values()) == {"yes"}
