"""Lightning: its processes, how it finds the callback, and what is refused."""

import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from torch.utils.data import DataLoader

from tests.integrations.lightning_modules import (
    EPOCHS,
    QUIET,
    WARNINGS,
    Noting,
    Validating,
    checkpoints,
    fit,
    open_loader,
    whole_run,
)
from vlm_stream.errors import ConfigError
from vlm_stream.integrations.lightning import StreamCallback, step_loss
from vlm_stream.state import RunState
from vlm_stream.testing.conformance import LaunchError, Run, check, launch
from vlm_stream.testing.conformance.compare import compare_batches, own_loop

pytestmark = WARNINGS


@pytest.mark.trainers
def test_ddp_conforms(tmp_path, conformance_data):
    report = check("tests.integrations.lightning_trainers:ddp", tmp_path, data=conformance_data)
    assert set(report.results.values()) == {"yes"}


@pytest.mark.slow
@pytest.mark.trainers
def test_processes_that_lightning_spawns_get_their_own_data(tmp_path, conformance_data):
    run = Run(data=conformance_data, folder=tmp_path / "checkpoints", records=tmp_path / "records", max_steps=2)
    records = launch("tests.integrations.lightning_trainers:ddp_spawn", run, world=2, own_launcher=True)
    want = [batches[: 2 * run.accumulation] for batches in own_loop(run, 2)]
    assert not compare_batches(records.train, want, whole=True)


@pytest.mark.slow
@pytest.mark.trainers
def test_peers_of_model_parallelism_get_the_same_data_or_a_sentence(tmp_path, conformance_data):
    run = Run(data=conformance_data, folder=tmp_path / "checkpoints", records=tmp_path / "peers")
    records = launch("tests.integrations.lightning_trainers:peers", run, world=2)
    own = own_loop(run, 1)[0][: run.accumulation]
    assert not compare_batches(records.train, [own, own], whole=True)
    run = replace(run, records=tmp_path / "refused")
    with pytest.raises(LaunchError, match=r"the loader found 2 ranks .* has 1 data-parallel ones"):
        launch("tests.integrations.lightning_trainers:peers_without_mesh", run, world=2)


@pytest.mark.slow
@pytest.mark.trainers
def test_the_example_runs_with_processes_that_lightning_starts(tmp_path, conformance_data):
    """Its environment tells the number of processes and not the rank."""
    root = Path(__file__).parents[2]
    command = [sys.executable, str(root / "examples" / "lightning_ddp.py"), str(conformance_data / "shards")]
    command += [str(conformance_data / "processor"), "--out", str(tmp_path), "--pack-size", "900", "--save-every", "4"]
    environment = {name: value for name, value in os.environ.items() if "RANK" not in name and "WORLD" not in name}
    environment |= {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for arguments, step, samples in ((["--devices", "2"], 4, 50), (["--devices", "1", "--resume"], 8, 70)):
        subprocess.run([*command, *arguments], env=environment, check=True, timeout=300)
        saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
        (state,) = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        assert (saved["global_step"], RunState.from_dict(state).cursor["delivered"]["samples"]) == (step, samples)


def test_lightning_finds_the_callback_where_the_package_is_installed(tmp_path, conformance_data, monkeypatch):
    """A plain `trainer.fit(module, loader)`: with a schedule Lightning loads no loader's state by itself."""
    root = Path(__file__).parents[2]
    groups = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    installed = tmp_path / "site" / "vlm_stream_as_installed-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: vlm-stream-as-installed\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items())
    )
    monkeypatch.syspath_prepend(str(installed.parent))
    saves = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=4)
    module = Noting()
    trainer = fit(module, open_loader(conformance_data), callbacks=[saves], max_steps=4)
    assert sum(isinstance(callback, StreamCallback) for callback in trainer.callbacks) >= 1
    ((path, _),) = checkpoints(tmp_path / "saved")
    resumed = Noting()
    fit(resumed, open_loader(conformance_data), ckpt_path=path, max_epochs=1)
    assert module.steps + resumed.steps == whole_run(conformance_data, 1, False)[:11]


def test_two_callbacks_do_as_one(tmp_path, conformance_data):
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=3)
    callbacks = [StreamCallback(), saves, StreamCallback()]
    fit(Noting(), open_loader(conformance_data, epochs=None), callbacks=callbacks, max_steps=3, max_epochs=-1)
    ((path, _),) = checkpoints(tmp_path)
    resumed = Noting()
    loader = open_loader(conformance_data, epochs=None)
    fit(resumed, loader, ckpt_path=path, callbacks=[StreamCallback(), StreamCallback()], max_steps=5, max_epochs=-1)
    assert resumed.steps == whole_run(conformance_data, 1, True)[3:5]


def test_a_trainer_without_the_callback_is_refused(conformance_data):
    trainer = Trainer(**QUIET, enable_checkpointing=False, max_steps=1)
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, StreamCallback)]
    with pytest.raises(ConfigError, match=r"without its plug.*StreamCallback"):
        trainer.fit(Noting(), open_loader(conformance_data))
    trainer.validate(Validating(), open_loader(conformance_data, train=False), verbose=False)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # of four rows
def test_other_loaders_are_left_alone(tmp_path):
    class Plain(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    saves = ModelCheckpoint(tmp_path, every_n_train_steps=1)
    loader = DataLoader([torch.ones(1)] * 4)
    options = {"callbacks": [StreamCallback(), saves], "accumulate_grad_batches": 2, "max_epochs": 1}
    fit(Plain(), loader, **options)
    ((path, _),) = checkpoints(tmp_path)
    fit(Plain(), loader, ckpt_path=path, **options | {"callbacks": [StreamCallback()], "max_epochs": 2})


class Unscaled(Noting):
    pops = False

    def training_step(self, batch, batch_idx):
        if self.pops:
            batch.pop("num_items_in_batch")
        return self.embedding(batch["input_ids"] % 1024).mean()


def test_a_loss_that_would_be_averaged_twice_is_refused(conformance_data):
    def train(module, micro_batches):
        options = {"accumulate_grad_batches": micro_batches, "max_steps": 1, "callbacks": [StreamCallback()]}
        fit(module, open_loader(conformance_data, micro_batches=micro_batches), **options)

    with pytest.raises(ConfigError, match=r"gradients would be 2 times too small; return .*step_loss"):
        train(Unscaled(), 2)
    train(Unscaled(), 1)
    own = Unscaled()
    own.pops = True
    train(own, 2)


def test_a_loss_without_label_counts_stays_as_it_is():
    module = Noting()
    module.trainer = Trainer(**QUIET, enable_checkpointing=False, accumulate_grad_batches=4)
    loss = torch.tensor(3.0)
    assert step_loss(module, loss, {}) is loss
    assert step_loss(module, loss, {"num_items_in_batch": 7}) == 12.0


@pytest.mark.parametrize(
    ("loader", "trainer", "match"),
    [
        (
            {"micro_batches": 2},
            {},
            r"accumulate_grad_batches=1\) and StreamLoader\(micro_batches=2\) differ.*same number",
        ),
        ({}, {"accumulate_grad_batches": 3}, r"accumulate_grad_batches=3\) and StreamLoader\(micro_batches=1\) differ"),
        ({}, {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}, r"accumulate_grad_batches=2\) and .*differ"),
        (
            {"micro_batches": 2},
            {"accumulate_grad_batches": 2, "limit_train_batches": 3},
            "an epoch of 3 batches .* ends within an optimizer step",
        ),
        ({"train": False}, {}, "built with train=False"),
        ({}, {"overfit_batches": 2}, r"overfit_batches=2 wants the same batches"),
    ],
)
def test_settings_that_would_not_be_exact_are_refused(conformance_data, loader, trainer, match):
    callbacks = [StreamCallback(), *trainer.pop("callbacks", [])]
    with pytest.raises(ConfigError, match=match):
        fit(
            Noting(with_schedule=False),
            open_loader(conformance_data, **loader),
            callbacks=callbacks,
            **EPOCHS | trainer,
        )


def test_an_evaluation_that_would_go_on_is_refused(conformance_data):
    trainer = Trainer(**QUIET, callbacks=[StreamCallback()], enable_checkpointing=False)
    with pytest.raises(ConfigError, match="an evaluation dataloader was built with train=True"):
        trainer.validate(Validating(), open_loader(conformance_data), verbose=False)


def test_without_lightning_a_sentence():
    code = "import sys; sys.modules['lightning'] = None; import vlm_stream.integrations.lightning"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ConfigError: Lightning is not installed" in found.stderr
    assert "pip install 'vlm-stream[trainers]'" in found.stderr
