"""transformers' Trainer on a StreamLoader: rounds, resumes, losses, evaluation, and what is refused."""

import itertools
import json
import logging
import math
import subprocess
import sys

import pytest
import torch
from transformers import TrainerCallback

from examples import transformers_trainer as example
from tests.integrations.hf_trainers import NoCounts
from vlm_stream import StreamLoader, VLMStream
from vlm_stream.errors import ConfigError, StateError
from vlm_stream.integrations import trainer_checks
from vlm_stream.integrations.trainer_checks import STATE_FILE
from vlm_stream.integrations.transformers import StreamMixin, StreamTrainer
from vlm_stream.testing import build_tiny_model
from vlm_stream.testing.conformance import Run, check, launch
from vlm_stream.testing.conformance.compare import compare_gradients, first_gradients, own_loop
from vlm_stream.testing.conformance.run import open_processor

STEPS = (3, 2, 3)
"""Optimizer steps of the first rounds of `make_loader`: packs are cut anew in each."""
RATE = 1e-2
SETTINGS = {
    "optim": "sgd",
    "learning_rate": RATE,
    "max_grad_norm": 0,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
}


@pytest.fixture(scope="module")
def processor(conformance_data):
    return open_processor(conformance_data)


@pytest.fixture(scope="module")
def make_loader(conformance_data, processor):
    def make(kind=StreamLoader, **changes):
        sources = {"data": {"url": str(conformance_data / "shards"), "sample_ratio": 0.15}}
        options = {"pack_size": 700, "window": 4, "micro_batches": 2, "fake_image": True} | changes
        return kind(sources, **{"processor": processor} | options)

    return make


@pytest.fixture(scope="module")
def make_model(processor):
    """Tiny models that list the tokens of each batch that they are given."""

    def make():
        model = build_tiny_model("qwen2_5_vl", processor)
        model.seen = []
        model.register_forward_pre_hook(
            lambda module, args, kwargs: module.seen.append(kwargs["input_ids"].flatten().tolist()), with_kwargs=True
        )
        return model

    return make


def tokens(batches):
    return [batch["input_ids"].flatten().tolist() for batch in batches]


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def largest_difference(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def logged(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


@pytest.mark.trainers
def test_the_example_conforms(conformance_data, tmp_path):
    function = "tests.integrations.hf_trainers:transformers_trainer"
    report = check(function, tmp_path, data=conformance_data, num_workers=1)
    assert set(report.results.values()) == {"yes"}


@pytest.fixture(scope="module")
def three_rounds(make_loader, make_model, tmp_path_factory):
    """A run over three rounds of different lengths, with a checkpoint after every step."""
    model, folder = make_model(), tmp_path_factory.mktemp("rounds")
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer = example.train(make_loader(), model, folder, num_train_epochs=3, **SETTINGS | saving)
    return trainer, model, folder


def test_rounds_of_different_lengths_are_trained_whole(three_rounds, make_loader):
    trainer, model, _ = three_rounds
    loader = make_loader()
    assert [len(list(loader)) for _ in STEPS] == [2 * steps for steps in STEPS]
    loader = make_loader()
    assert model.seen == tokens(batch for _ in STEPS for batch in loader)
    assert trainer.state.global_step == trainer.state.max_steps == sum(STEPS)
    epochs = [number + (step + 1) / steps for number, steps in enumerate(STEPS) for step in range(steps)]
    assert logged(trainer, "epoch")[: sum(STEPS)] == pytest.approx(epochs)
    rates = [RATE * (1 - step / sum(STEPS)) for step in range(sum(STEPS))]
    assert logged(trainer, "learning_rate") == pytest.approx(rates)
    assert all(map(math.isfinite, logged(trainer, "loss")))  # also of batches that only fill a step


@pytest.mark.parametrize("done", [2, 3, 4])  # inside the first round, between two, inside the second
def test_a_resumed_run_ends_as_if_it_had_never_stopped(three_rounds, make_loader, make_model, done):
    trainer, model, folder = three_rounds
    resumed_model = make_model()
    resumed_model.lm_head.weight.data.zero_()  # all of it must come from the checkpoint
    again = example.train(
        make_loader(), resumed_model, folder, num_train_epochs=3, resume=folder / f"checkpoint-{done}", **SETTINGS
    )
    assert resumed_model.seen == model.seen[2 * done :]
    assert again.state.global_step == again.state.max_steps == sum(STEPS)
    for name in ("epoch", "learning_rate", "loss"):
        assert logged(again, name)[: sum(STEPS)] == pytest.approx(logged(trainer, name)[: sum(STEPS)])
    assert largest_difference(weights(resumed_model), weights(model)) < 1e-6


def test_a_run_that_is_done_is_not_trained_on(three_rounds, make_loader, make_model):
    _, _, folder = three_rounds
    model = make_model()
    again = example.train(
        make_loader(), model, folder, num_train_epochs=3, resume=folder / f"checkpoint-{sum(STEPS)}", **SETTINGS
    )
    assert model.seen == []
    assert again.state.global_step == sum(STEPS)


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 2), (1, 3), (1.5, 4), (2, 5), (3, 8)])
def test_epochs_become_the_steps_of_their_own_rounds(make_loader, make_model, tmp_path, epochs, steps):
    arguments = example.TrainingArguments(
        str(tmp_path), gradient_accumulation_steps=2, num_train_epochs=epochs, **SETTINGS
    )
    loader = make_loader()
    trainer = StreamTrainer(model=make_model(), args=arguments, train_dataset=loader)
    assert trainer.set_initial_training_values(arguments, loader)[-1] == steps


def test_steps_may_go_beyond_the_first_round(make_loader, make_model, tmp_path):
    model = make_model()
    trainer = example.train(make_loader(), model, tmp_path, max_steps=6, **SETTINGS)
    loader = make_loader()
    assert model.seen == tokens(itertools.islice((batch for _ in STEPS for batch in loader), 12))
    assert trainer.state.epoch == pytest.approx(2 + 1 / 3)


def test_training_again_goes_on_with_the_next_round(make_loader, make_model, tmp_path):
    arguments = example.TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, num_train_epochs=1, **SETTINGS)
    model, loader = make_model(), make_loader(num_workers=1)
    trainer = StreamTrainer(model, arguments, None, loader)  # by position, as Trainer takes it
    assert [trainer.train().global_step for _ in STEPS] == list(STEPS)
    loader = make_loader()
    assert model.seen == tokens(batch for _ in STEPS for batch in loader)


def test_steps_over_an_endless_stream_are_saved_and_resumed(make_loader, make_model, tmp_path):
    model = make_model()
    saving = {"save_strategy": "steps", "save_steps": 2}
    example.train(make_loader(epochs=None), model, tmp_path, max_steps=5, **SETTINGS | saving)
    expected = tokens(itertools.islice(make_loader(epochs=None), 10))
    assert model.seen == expected
    resumed_model = make_model()
    again = example.train(
        make_loader(epochs=None), resumed_model, tmp_path, resume=tmp_path / "checkpoint-2", max_steps=5, **SETTINGS
    )
    assert resumed_model.seen == expected[4:]
    assert logged(again, "epoch")[2:5] == pytest.approx([0.6, 0.8, 1.0])


def test_an_endless_stream_without_steps_is_refused_by_trainer(make_loader, make_model, tmp_path):
    with pytest.raises(ValueError, match="max_steps has to be specified"):
        example.train(make_loader(epochs=None), make_model(), tmp_path, **SETTINGS)


class StopInsideAStep(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 1

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_save = True


def test_batches_of_a_step_that_was_not_done_are_not_in_a_checkpoint(make_loader, make_model, tmp_path):
    model = make_model()
    example.train(make_loader(), model, tmp_path, callbacks=[StopInsideAStep()], **SETTINGS)
    assert len(model.seen) == 3  # of two steps with two micro-batches each
    loader = make_loader()
    loader.load_state_dict(json.loads((tmp_path / "checkpoint-1" / STATE_FILE).read_text()))
    assert tokens(loader) == tokens(make_loader())[2:]


def test_the_best_model_is_loaded_at_the_end(make_loader, make_model, tmp_path):
    model = make_model()
    steps = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    eval_loader = make_loader(train=False, micro_batches=1)
    trainer = example.train(make_loader(), model, tmp_path, eval_loader=eval_loader, **SETTINGS | steps | best)
    assert trainer.state.best_global_step == 1
    saved = type(model).from_pretrained(tmp_path / "checkpoint-1")
    assert largest_difference(weights(model), weights(saved)) == 0


@pytest.fixture(scope="module")
def trained_weights(make_loader, make_model, tmp_path_factory):
    model = make_model()
    trainer = example.train(make_loader(), model, tmp_path_factory.mktemp("weights"), **SETTINGS)
    assert not trainer._model_divides  # as transformers says of most vision-language models
    return weights(model)


def test_a_model_that_divides_by_itself_is_given_the_count(make_loader, make_model, trained_weights, tmp_path):
    model = make_model()
    model.accepts_loss_kwargs = True  # and it does: its loss takes num_items_in_batch
    trainer = example.train(make_loader(), model, tmp_path, **SETTINGS)
    assert trainer._model_divides
    assert largest_difference(weights(model), trained_weights) < 1e-7


def test_counts_that_the_plan_does_not_know_are_added_up(make_loader, make_model, trained_weights, tmp_path):
    model = make_model()
    example.train(make_loader(NoCounts), model, tmp_path, **SETTINGS)
    assert largest_difference(weights(model), trained_weights) < 1e-7


def test_names_of_samples_are_not_for_the_model(make_loader, make_model, trained_weights, tmp_path):
    model = make_model()
    example.train(make_loader(with_refs=True), model, tmp_path, **SETTINGS)
    assert largest_difference(weights(model), trained_weights) == 0


@pytest.mark.trainers
def test_two_ranks_add_up_labels_that_the_plan_does_not_know(conformance_data, tmp_path):
    run = Run(data=conformance_data, folder=tmp_path / "out", records=tmp_path / "records")
    records = launch("tests.integrations.hf_trainers:transformers_without_counts", run, world=2, timeout_s=150)
    assert compare_gradients(records.gradients, first_gradients(run, own_loop(run, 2))) == []
    assert [len(records.train[rank]) for rank in range(2)] == [12, 12]  # also the last step, where a rank has no labels


@torch.no_grad()
def own_eval_loss(model, loader):
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in loader:
        labels = int((batch["labels"][:, 1:] != -100).sum())
        mean = model(**{**batch, "num_items_in_batch": max(labels, 1)}, use_cache=False).loss
        sums += torch.tensor([float(mean) * labels, labels])
    return float(sums[0] / sums[1])


def test_the_evaluation_loss_is_the_mean_over_all_labels(make_loader, make_model, tmp_path):
    model = make_model()
    loaders = {
        name: make_loader(train=False, micro_batches=1, pack_size=size) for name, size in (("a", 700), ("b", 900))
    }
    arguments = example.TrainingArguments(str(tmp_path), per_device_eval_batch_size=8, **SETTINGS)
    trainer = StreamTrainer(model=model, args=arguments, eval_dataset=loaders)
    first, second = trainer.evaluate(), trainer.evaluate()
    for name, loader in loaders.items():
        assert first[f"eval_{name}_loss"] == second[f"eval_{name}_loss"]
        assert first[f"eval_{name}_loss"] == pytest.approx(own_eval_loss(model, loader), rel=1e-6)
    assert first["eval_a_loss"] == pytest.approx(first["eval_b_loss"], rel=1e-6)  # other packs of the same samples
    alone = trainer.evaluate(loaders["a"])
    assert alone["eval_loss"] == first["eval_a_loss"]
    steps = alone["eval_steps_per_second"] * alone["eval_runtime"]
    assert steps == pytest.approx(len(loaders["a"]), rel=0.02)
    assert trainer.predict(loaders["a"]).metrics["test_loss"] == pytest.approx(first["eval_a_loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.trainers
def test_two_ranks_evaluate_like_one(conformance_data, tmp_path):
    run = Run(data=conformance_data, folder=tmp_path / "out", records=tmp_path / "records", evaluations=1)
    told = launch("tests.integrations.hf_trainers:evaluate_with_trainer", run, world=2).told
    model = build_tiny_model("qwen2_5_vl", run.processor())
    expected = own_eval_loss(model, run.eval_loader(rank=0, world_size=1))
    assert [told[rank]["eval_loss"] for rank in range(2)] == pytest.approx([expected] * 2, rel=1e-6)


def test_other_datasets_are_left_to_trainer(make_loader, make_model, tmp_path):
    model, batches = make_model(), [dict(batch) for batch in itertools.islice(make_loader(), 2)]
    arguments = example.TrainingArguments(str(tmp_path), per_device_train_batch_size=1, **SETTINGS)
    trainer = StreamTrainer(model=model, args=arguments, train_dataset=batches, data_collator=lambda rows: rows[0])
    assert trainer.train().global_step == 6
    assert sorted(model.seen) == sorted(3 * tokens(batches))


@pytest.mark.slow
@pytest.mark.trainers
def test_the_example_runs_from_the_command_line(conformance_data, make_model, processor, tmp_path, monkeypatch, capsys):
    make_model().save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    shards = str(conformance_data / "shards")
    line = ["example", shards, str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--pack-size", "2000"]
    monkeypatch.setattr(sys, "argv", [*line, "--epochs", "0.4"])
    example.main()
    monkeypatch.setattr(sys, "argv", [*line, "--resume"])
    example.main()
    assert capsys.readouterr().out.count("loss after training: ") == 2
    assert (tmp_path / "out" / "checkpoint-3" / STATE_FILE).exists()


# What is refused


def make_trainer(make_loader, make_model, folder, kind=StreamTrainer, **changes):
    given = {"train_dataset": make_loader()} | {
        name: changes.pop(name) for name in ("train_dataset", "eval_dataset", "data_collator") if name in changes
    }
    arguments = example.TrainingArguments(str(folder), **SETTINGS | {"gradient_accumulation_steps": 2} | changes)
    return kind(model=make_model(), args=arguments, **given)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps=1, but the loader plans .* micro_batches=2"),
        ({"train_sampling_strategy": "group_by_length"}, "'group_by_length' would be ignored, .* mode='grouped'"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True would begin again with the same batches"),
        ({"data_collator": lambda rows: rows[0]}, "data_collator is given, .* give the StreamLoader a collate_fn"),
    ],
)
def test_what_a_loader_decides_is_refused_as_an_argument(make_loader, make_model, tmp_path, changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_trainer(make_loader, make_model, tmp_path, **changes)


def test_arguments_of_trainers_own_data_loaders_are_named(make_loader, make_model, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "vlm_stream"):
        make_trainer(make_loader, make_model, tmp_path, dataloader_num_workers=2, dataloader_drop_last=True)
    assert "dataloader_num_workers=2 is ignored by a StreamLoader: give it num_workers= instead" in caplog.text
    assert "dataloader_drop_last=True is ignored by a StreamLoader" in caplog.text


def test_shifted_labels_are_refused(make_loader, make_model, tmp_path):
    with pytest.raises(ConfigError, match="hf_labels=False, so its labels are shifted"):
        make_trainer(make_loader, make_model, tmp_path, train_dataset=make_loader(hf_labels=False))


@pytest.mark.parametrize("name", ["train_dataset", "eval_dataset"])
def test_a_bare_stream_is_refused(make_loader, make_model, tmp_path, name):
    stream = make_loader(VLMStream)
    with pytest.raises(ConfigError, match=f"{name} is a VLMStream, .* give it a StreamLoader"):
        make_trainer(make_loader, make_model, tmp_path, **{name: stream})


def test_a_loader_for_training_is_refused_for_evaluation(make_loader, make_model, tmp_path):
    loader = make_loader()
    with pytest.raises(ConfigError, match="every evaluation would see other samples; give it a StreamLoader with"):
        make_trainer(make_loader, make_model, tmp_path, train_dataset=loader, eval_dataset=loader)
    with pytest.raises(ConfigError, match="every evaluation would see other samples"):
        make_trainer(make_loader, make_model, tmp_path, eval_dataset={"some": make_loader()})
    with pytest.raises(ConfigError, match="every evaluation would see other samples"):
        make_trainer(make_loader, make_model, tmp_path).evaluate(make_loader())


def test_several_gpus_in_one_process_are_refused(make_loader, make_model, tmp_path):
    arguments = example.TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, **SETTINGS)
    assert arguments.n_gpu == 0
    arguments._n_gpu = 4  # as Trainer finds them on a machine with 4
    with pytest.raises(
        ConfigError, match=r"over 4 GPUs with nn\.DataParallel, which cuts .*torchrun --nproc-per-node 4"
    ):
        StreamTrainer(model=make_model(), args=arguments, train_dataset=make_loader())


def test_other_ranks_than_trainers_are_refused(make_loader, make_model, tmp_path):
    loader = make_loader(rank=0, world_size=2)
    trainer = make_trainer(make_loader, make_model, tmp_path, train_dataset=loader)
    with pytest.raises(ConfigError, match="deals its data to 2 ranks and Trainer has 1 data-parallel ones"):
        trainer.train()


def test_a_trainer_that_cuts_sequences_is_refused(make_loader, make_model, tmp_path):
    class Cutting(StreamTrainer):
        def get_cp_size(self):
            return 2

    trainer = make_trainer(make_loader, make_model, tmp_path, Cutting)
    with pytest.raises(ConfigError, match="context parallelism of size 2 makes Trainer cut all tensors along"):
        trainer.train()


def test_trls_trainers_want_their_own_mixin(make_loader, make_model, tmp_path):
    from trl import DPOTrainer

    class Mine(StreamMixin, DPOTrainer):
        pass

    with pytest.raises(ConfigError, match=r"TRL's DPOTrainer looks into its dataset .* use StreamSFTTrainer"):
        Mine(model=make_model(), train_dataset=make_loader())


def test_a_release_whose_loop_is_another_is_refused():
    with pytest.raises(ConfigError, match=r"has no _init_training_state, .*install transformers 5\.3 or later"):
        trainer_checks.check_release(object)


def test_a_checkpoint_without_a_position_is_refused(three_rounds, make_loader, make_model, tmp_path):
    import shutil

    shutil.copytree(three_rounds[2] / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / STATE_FILE).write_text("[")
    with pytest.raises(StateError, match=r"vlm_stream\.json is no JSON object .* resume from an older checkpoint"):
        example.train(make_loader(), make_model(), tmp_path, resume=True, **SETTINGS)
    (tmp_path / "checkpoint-2" / STATE_FILE).unlink()
    with pytest.raises(StateError, match=r"has no vlm_stream\.json, so nobody knows which samples .*ignore_data_skip"):
        example.train(make_loader(), make_model(), tmp_path, resume=True, **SETTINGS)
    model = make_model()
    example.train(make_loader(), model, tmp_path, resume=True, ignore_data_skip=True, max_steps=3, **SETTINGS)
    assert model.seen == tokens(itertools.islice(make_loader(), 2))


def test_a_missing_package_is_named():
    code = "import sys; sys.modules['accelerate'] = None; import vlm_stream.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs the package 'accelerate', which is not installed" in done.stderr
    assert "pip install 'vlm-stream[trainers]'" in done.stderr


def test_the_room_itself_imports_no_trainer():
    code = (
        "import sys, vlm_stream.integrations; sys.exit(any(n in sys.modules for n in ('transformers', 'trl', 'torch')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
