"""accelerate: a StreamLoader passes as it is, a bare stream is never cut in silence, and what is refused."""

import itertools
import json
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator

from examples import accelerate_loop as example
from vlm_stream.errors import ConfigError
from vlm_stream.integrations.accelerate import loss_scale, register
from vlm_stream.testing import build_tiny_model
from vlm_stream.testing.conformance import Run, check, launch
from vlm_stream.testing.conformance.compare import own_loop
from vlm_stream.testing.conformance.run import digests


@pytest.fixture
def run(conformance_data, tmp_path):
    return Run(data=conformance_data, folder=tmp_path / "out", records=tmp_path / "records")


@pytest.mark.trainers
def test_the_example_conforms(conformance_data, tmp_path):
    report = check("tests.integrations.hf_trainers:accelerate_loop", tmp_path, data=conformance_data)
    assert set(report.results.values()) == {"yes"}


@pytest.mark.slow
@pytest.mark.trainers
@pytest.mark.parametrize("world", [1, 2])
def test_no_batch_of_a_bare_stream_is_cut_or_lost_in_silence(run, world):
    launch("tests.integrations.hf_trainers:bare_streams", run, world=world)
    expected = [[given.keys for given in rank] for rank in own_loop(run, world)]
    for rank in range(world):
        found = json.loads((run.folder / f"found-{rank}.json").read_text())
        assert len(found) == 12
        whole = {name: result for name, result in found.items() if isinstance(result, list)}
        assert whole == ({"False None 0": expected[0], "False None 1": expected[0]} if world == 1 else {})
        refused = {name for name, result in found.items() if "or a StreamLoader" in result or "give the" in result}
        others = set(found) - set(whole) - refused
        assert others <= NOT_SEEN if rank == 0 else others <= NOT_SEEN | NOT_HEARD
        assert not any("None 0" in name and "False" not in name for name in others)


NOT_SEEN = {"None None 1", "True None 1", "False None 0", "False None 1"}
"""Settings whose error is accelerate's own: a worker does not know that its batches will be cut, and there accelerate
cannot join them; several processes that are not dispatched to have no use for `batch_size=None`."""
NOT_HEARD = {"None 1 1", "True 1 1"}
"""Those where the worker of the first process raises, and the other processes only hear that it is gone."""


def test_prepare_leaves_a_loader_as_it_is(run):
    loader = run.loader(rank=0, world_size=1)
    assert Accelerator(cpu=True).prepare(loader) is loader


def test_a_position_goes_through_save_state(run, tmp_path):
    def take(loader, most=None):
        return [digests(batch) for batch in itertools.islice(loader, most)]

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = register(accelerator, run.loader())
    take(loader, 3)
    accelerator.save_state(str(tmp_path / "state"))
    expected = take(loader)
    accelerator.load_state(str(tmp_path / "state"))
    assert take(loader) == expected


def test_the_loss_of_accumulated_steps_is_that_of_one_big_batch(run):
    """Beside the conformance of the example: without `loss_scale` it is a half."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = run.loader()
    model = build_tiny_model("qwen2_5_vl", run.processor())
    prepared = accelerator.prepare(model)
    for batch in itertools.islice(loader, 2):
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**batch, use_cache=False).loss * loss_scale(accelerator, loader))
    accumulated = model.lm_head.weight.grad.clone()
    model.zero_grad()
    batch = dict(next(iter(run.loader(micro_batches=1, batch_size=2))))
    del batch["num_items_in_batch"]
    model(**batch, use_cache=False).loss.backward()
    torch.testing.assert_close(accumulated, model.lm_head.weight.grad, rtol=0, atol=1e-6)


def test_other_steps_than_the_loaders_are_refused(run):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=3, but the loader plans .*micro_batches=2"):
        register(accelerator, run.loader())


def test_other_ranks_than_the_accelerators_are_refused(run):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match="deals its data to 2 ranks and the accelerator has 1 data-parallel ones"):
        register(accelerator, run.loader(rank=0, world_size=2))


@pytest.mark.slow
@pytest.mark.trainers
def test_the_example_runs_from_the_command_line(run, tmp_path, monkeypatch, capsys):
    build_tiny_model("qwen2_5_vl", run.processor()).save_pretrained(tmp_path / "model")
    run.processor().save_pretrained(tmp_path / "model")
    line = ["example", run.sources, str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--pack-size", "4000"]
    monkeypatch.setattr(sys, "argv", line)
    example.main()
    assert "loss after training: " in capsys.readouterr().out


def test_a_missing_package_is_named():
    code = "import sys; sys.modules['accelerate'] = None; import vlm_stream.integrations.accelerate"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs the package 'accelerate', which is not installed" in done.stderr
    assert "pip install 'vlm-stream[trainers]'" in done.stderr
