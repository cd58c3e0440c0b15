"""Lightning: what a checkpoint says was trained on, however it was saved, is what was trained on."""

import functools
import itertools
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader

from tests.integrations.lightning_modules import QUIET, Noting, Validating, fit, names, open_loader
from vlm_stream.errors import ConfigError
from vlm_stream.integrations.lightning import StreamCallback, step_loss
from vlm_stream.stream import RunState
from vlm_stream.testing.conformance import LaunchError, Run, check, launch
from vlm_stream.testing.conformance.compare import compare_batches
from vlm_stream.testing.conformance.expect import own_loop

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's use of torch's pytree
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),  # the resumed run saves nothing
    pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=None"),  # what OnExceptionCheckpoint brings about
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint"),
]

EPOCHS = {"max_epochs": 2}
STEPS = {"max_steps": 14, "max_epochs": -1}


@functools.cache
def whole_run(data, micro_batches, endless):
    """The steps of a run that nobody interrupts."""
    loader = open_loader(data, micro_batches=micro_batches, epochs=None if endless else 1)
    module = Noting()
    fit(module, loader, callbacks=[StreamCallback()], accumulate_grad_batches=micro_batches, **run_of(endless))
    return module.steps


def run_of(endless):
    return STEPS if endless else EPOCHS


def checkpoints(folder):
    found = sorted(folder.glob("*.ckpt"))
    assert found
    return [(path, torch.load(path, weights_only=True)["global_step"]) for path in found]


def resume(data, path, micro_batches=1, endless=False, **options):
    module = Noting()
    loader = open_loader(data, micro_batches=micro_batches, epochs=None if endless else 1)
    options = {"callbacks": [StreamCallback()], "accumulate_grad_batches": micro_batches} | run_of(endless) | options
    fit(module, loader, ckpt_path=path, **options)
    return module


@pytest.mark.trainers
def test_ddp_conforms(tmp_path, conformance_data):
    report = check("tests.integrations.lightning_trainers:ddp", tmp_path, data=conformance_data)
    assert set(report.results.values()) == {"yes"}


def test_every_epoch_delivers_every_sample_once_in_another_order(conformance_data):
    steps = whole_run(conformance_data, 1, False)
    loader = open_loader(conformance_data)
    lengths = loader.count_batches(2)
    assert lengths == [11, 12]
    assert len(steps) == sum(lengths)
    ends = list(itertools.accumulate(lengths, initial=0))
    epochs = [[name for step in steps[a:b] for batch in step for name in batch] for a, b in itertools.pairwise(ends)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(set(epochs[0]))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("endless", [False, True], ids=["epochs", "endless"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_saved_after_any_step(tmp_path, conformance_data, micro_batches, endless):
    whole = whole_run(conformance_data, micro_batches, endless)
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    resume(conformance_data, None, micro_batches, endless, callbacks=[saves, StreamCallback()])
    ends = {1: {1, 10, 11, 12, 22, 23}, 2: {1, 5, 6, 7, 11, 12}}[micro_batches]
    found = [(path, step) for path, step in checkpoints(tmp_path) if step in ends]
    assert len(found) >= 4
    for path, step in found:
        assert resume(conformance_data, path, micro_batches, endless).steps == whole[step:], path.name


def test_saved_at_the_end_of_an_epoch(tmp_path, conformance_data):
    saves = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1, save_on_train_epoch_end=True)
    resume(conformance_data, None, callbacks=[saves, StreamCallback()])
    found = checkpoints(tmp_path)
    assert [step for _, step in found] == [11, 23]
    for path, step in found:
        assert resume(conformance_data, path).steps == whole_run(conformance_data, 1, False)[step:]


@pytest.mark.parametrize("endless", [False, True], ids=["epochs", "endless"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("fail_at", [0, 11, 12, 13])
def test_saved_when_a_training_step_raises(tmp_path, conformance_data, micro_batches, endless, fail_at):
    """Batches of a step that was not made are trained on again: their gradients are lost."""
    module = Noting(fail_at=fail_at)
    loader = open_loader(conformance_data, micro_batches=micro_batches, epochs=None if endless else 1)
    callbacks = [OnExceptionCheckpoint(tmp_path), StreamCallback()]
    fit(module, loader, callbacks=callbacks, accumulate_grad_batches=micro_batches, **run_of(endless))
    ((path, step),) = checkpoints(tmp_path)
    assert step == fail_at // micro_batches
    assert module.steps + resume(conformance_data, path, micro_batches, endless).steps == whole_run(
        conformance_data, micro_batches, endless
    )


def test_saved_by_another_callback_between_batches(tmp_path, conformance_data):
    class Saving(Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.save_checkpoint(tmp_path / f"end-{trainer.global_step}.ckpt")

        def on_train_batch_start(self, trainer, *_):
            trainer.save_checkpoint(tmp_path / f"start-{trainer.global_step}.ckpt")

    module = Noting()
    callbacks = [Saving(), StreamCallback()]
    fit(module, open_loader(conformance_data, epochs=None), callbacks=callbacks, max_steps=3, max_epochs=-1)
    for path, step in checkpoints(tmp_path):
        resumed = resume(conformance_data, path, endless=True, max_steps=step + 2)
        assert resumed.steps == whole_run(conformance_data, 1, True)[step : step + 2], path.name


def test_after_a_fit_the_loader_stands_behind_what_was_trained_on(conformance_data):
    """Lightning drops the batch that it fetched ahead; the next fit begins with it."""
    loader, steps = open_loader(conformance_data, epochs=None), []
    for _ in range(2):
        module = Noting()
        fit(module, loader, callbacks=[StreamCallback()], max_steps=3, max_epochs=-1)
        steps += module.steps
    assert steps == whole_run(conformance_data, 1, True)[:6]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resumed_with_another_number_of_ranks(tmp_path, conformance_data, before, after):
    """Few batches are left for many ranks and many for few: Lightning counts with the number of a new run."""
    module = Noting()
    loader = open_loader(conformance_data, rank=0, world_size=before, pack_size=1000)
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=8)
    fit(module, loader, callbacks=[saves, StreamCallback()], max_steps=8)
    ((path, _),) = checkpoints(tmp_path)
    ours = open_loader(conformance_data, rank=0, world_size=after, pack_size=1000)
    ours.load_state_dict(loader.state_dict())
    rest = [[names(batch)] for batch in ours]
    assert 8 + len(rest) != len(open_loader(conformance_data, rank=0, world_size=after, pack_size=1000))
    resumed = Noting()
    loader = open_loader(conformance_data, rank=0, world_size=after, pack_size=1000)
    fit(resumed, loader, ckpt_path=path, callbacks=[StreamCallback()], max_epochs=1)
    assert resumed.steps == rest
    assert resumed.total_steps == 8 + len(rest)


class Data(LightningDataModule):
    def __init__(self, data, **options):
        super().__init__()
        self.data, self.options = data, options

    def train_dataloader(self):
        return open_loader(self.data, **self.options)

    def val_dataloader(self):
        return open_loader(self.data, train=False)


class WithData(Noting):
    def __init__(self, data):
        super().__init__()
        self.data = data

    def train_dataloader(self):
        return open_loader(self.data)


@pytest.mark.parametrize("way", ["datamodule", "module"])
@pytest.mark.parametrize("reload", [0, 1], ids=["once", "reloaded"])
def test_loaders_from_hooks_and_reloaded_ones(tmp_path, conformance_data, way, reload):
    """A hook that builds a new loader for every epoch gets one that goes on."""
    whole = whole_run(conformance_data, 1, False)
    options = {"reload_dataloaders_every_n_epochs": reload} | EPOCHS

    def train(ckpt_path, *callbacks):
        module = WithData(conformance_data) if way == "module" else Validating()
        data = Data(conformance_data) if way == "datamodule" else None
        fit(module, datamodule=data, ckpt_path=ckpt_path, callbacks=[*callbacks, StreamCallback()], **options)
        return module

    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    assert train(None, saves).steps == whole
    for step in (4, 11, 15):
        assert train(tmp_path / f"step={step}.ckpt").steps == whole[step:]


def test_validations_are_alike_and_come_when_they_should(tmp_path, conformance_data):
    def train(ckpt_path, *callbacks):
        module = Validating()
        callbacks = [*callbacks, StreamCallback()]
        fit(module, datamodule=Data(conformance_data), ckpt_path=ckpt_path, callbacks=callbacks, **EPOCHS)
        return module

    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    whole = train(None, saves)
    assert list(whole.validated) == [11, 23]
    assert whole.validated[11] == whole.validated[23]
    assert train(tmp_path / "step=18.ckpt").validated == {23: whole.validated[23]}


def test_a_loader_that_is_not_at_its_start(conformance_data):
    """An epoch has as many batches as are left."""
    loader = open_loader(conformance_data)
    taken = [[names(batch)] for batch in itertools.islice(loader, 4)]
    module = Validating()
    fit(module, loader, open_loader(conformance_data, train=False), callbacks=[StreamCallback()], **EPOCHS)
    assert taken + module.steps == whole_run(conformance_data, 1, False)
    assert list(module.validated) == [7, 19]


def test_epochs_of_a_few_batches(tmp_path, conformance_data):
    """With limit_train_batches the stream goes on from epoch to epoch, and into its own next one."""
    options = {"callbacks": [StreamCallback()], "limit_train_batches": 4, "max_epochs": 4}
    module = Noting()
    fit(module, open_loader(conformance_data), **options)
    assert module.steps == whole_run(conformance_data, 1, False)[:15]
    assert module.epochs == [0] * 4 + [1] * 4 + [2] * 3 + [3] * 4


@pytest.mark.trainers
def test_processes_that_lightning_spawns_get_their_own_data(tmp_path, conformance_data):
    run = Run(data=conformance_data, folder=tmp_path / "checkpoints", records=tmp_path / "records", max_steps=2)
    records = launch("tests.integrations.lightning_trainers:ddp_spawn", run, world=2, own_launcher=True)
    want = [batches[: 2 * run.accumulation] for batches in own_loop(run, 2)]
    assert not compare_batches(records.train, want, whole=True)


@pytest.mark.trainers
def test_peers_of_model_parallelism_get_the_same_data_or_a_sentence(tmp_path, conformance_data):
    run = Run(data=conformance_data, folder=tmp_path / "checkpoints", records=tmp_path / "peers")
    records = launch("tests.integrations.lightning_trainers:peers", run, world=2)
    own = own_loop(run, 1)[0][: run.accumulation]
    assert not compare_batches(records.train, [own, own], whole=True)
    run = replace(run, records=tmp_path / "refused")
    with pytest.raises(LaunchError, match=r"the loader found 2 ranks .* has 1 data-parallel ones"):
        launch("tests.integrations.lightning_trainers:peers_without_mesh", run, world=2)


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
