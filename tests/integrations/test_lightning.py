"""Lightning: what a checkpoint says was trained on, however it was saved, is what was trained on."""

import itertools

import pytest
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.integrations.lightning_modules import (
    EPOCHS,
    WARNINGS,
    Noting,
    Validating,
    checkpoints,
    fit,
    names,
    open_loader,
    resume,
    run_of,
    whole_run,
)
from vlm_stream.integrations.lightning import StreamCallback

pytestmark = WARNINGS


@pytest.mark.parametrize("endless", [False, True], ids=["epochs", "endless"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_step_is_that_of_our_own_loop(conformance_data, micro_batches, endless):
    assert resume(conformance_data, None, micro_batches, endless).steps == whole_run(
        conformance_data, micro_batches, endless
    )


def test_every_epoch_delivers_every_sample_once_in_another_order(conformance_data):
    module = resume(conformance_data, None)
    assert module.epochs == [0] * 11 + [1] * 12
    first, second = (list(itertools.chain(*itertools.chain(*part))) for part in (module.steps[:11], module.steps[11:]))
    assert sorted(first) == sorted(second) == sorted(set(first))
    assert first != second


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
