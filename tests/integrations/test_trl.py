"""TRL's SFTTrainer on a StreamLoader: packed images, its own metrics, right token counts, and what is refused."""

import subprocess
import sys

import pytest
import torch
from trl import SFTConfig

from examples import trl_sft as example
from vlm_stream import StreamLoader
from vlm_stream.errors import ConfigError
from vlm_stream.integrations.trl import StreamSFTMixin, StreamSFTTrainer
from vlm_stream.testing import build_tiny_model
from vlm_stream.testing.conformance import check
from vlm_stream.testing.conformance.run import open_processor

SETTINGS = {
    "optim": "sgd",
    "learning_rate": 1e-2,
    "max_grad_norm": 0,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "num_train_epochs": 1,
    "save_strategy": "no",
}


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch):
    monkeypatch.setenv("CI", "1")  # TRL reports its use to a server otherwise


@pytest.fixture(scope="module")
def processor(conformance_data):
    return open_processor(conformance_data)


@pytest.fixture(scope="module")
def make_loader(conformance_data, processor):
    def make(**changes):
        sources = {"data": {"url": str(conformance_data / "shards"), "sample_ratio": 0.15}}
        options = {"pack_size": 700, "window": 4, "micro_batches": 2, "fake_image": True} | changes
        return StreamLoader(sources, **{"processor": processor} | options)

    return make


def logged(trainer, name):
    return [line[name] for line in trainer.state.log_history if name in line]


@pytest.mark.trainers
def test_the_example_conforms(conformance_data, tmp_path):
    report = check("tests.integrations.hf_trainers:trl_sft", tmp_path, data=conformance_data)
    assert set(report.results.values()) == {"yes"}


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 1},
        {"batch_size": 2},  # rows are padded to the longer one
        {"batch_size": 2, "attention": "mask4d"},
        {"mode": "plain", "pack_size": None, "batch_size": 2},
    ],
)
def test_tokens_are_counted_without_padding(make_loader, processor, tmp_path, options):
    loader = make_loader(fake_image=False, **options)
    trainer = example.train(loader, build_tiny_model("qwen2_5_vl", processor), tmp_path, **SETTINGS)
    alone = make_loader(mode="plain", pack_size=None, micro_batches=1, fake_image=False)
    assert logged(trainer, "num_tokens")[-1] == sum(batch["input_ids"].numel() for batch in alone)


def test_loss_entropy_and_accuracy_are_trls_own(make_loader, processor, tmp_path):
    model, own = build_tiny_model("qwen2_5_vl", processor), build_tiny_model("qwen2_5_vl", processor)
    trainer = example.train(make_loader(), model, tmp_path, **SETTINGS)
    first = list(make_loader())[:2]
    losses, entropies, hits = [], [], []
    for batch in first:
        with torch.no_grad():
            outputs = own(**batch, use_cache=False)
        wanted = batch["labels"][0, 1:]
        logits = outputs.logits[0, :-1][wanted != -100]
        losses.append(float(outputs.loss))
        entropies.append(float(torch.distributions.Categorical(logits=logits).entropy().mean()))
        hits.append(float((logits.argmax(-1) == wanted[wanted != -100]).float().mean()))
    assert logged(trainer, "loss")[0] == pytest.approx(sum(losses), rel=1e-5)
    assert logged(trainer, "entropy")[0] == pytest.approx(sum(entropies) / 2, rel=1e-4)
    assert logged(trainer, "mean_token_accuracy")[0] == pytest.approx(sum(hits) / 2, abs=1e-6)


def test_evaluation_has_the_loss_over_all_labels_and_trls_metrics(make_loader, processor, tmp_path):
    eval_loaders = {
        name: make_loader(train=False, micro_batches=1, pack_size=size) for name, size in (("a", 700), ("b", 900))
    }
    config = SFTConfig(str(tmp_path), gradient_accumulation_steps=2, **SETTINGS)
    trainer = StreamSFTTrainer(
        model=build_tiny_model("qwen2_5_vl", processor),
        args=config,
        train_dataset=make_loader(),
        eval_dataset=eval_loaders,
    )
    metrics = trainer.evaluate()
    assert metrics["eval_a_loss"] == pytest.approx(metrics["eval_b_loss"], rel=1e-6)
    assert metrics["eval_a_loss"] == trainer.evaluate(eval_loaders["a"])["eval_loss"]
    assert 0 < metrics["eval_entropy"] < 10
    assert metrics["eval_num_tokens"] == 0


def test_the_processor_is_the_loaders_own(make_loader, processor, conformance_data, tmp_path):
    config = SFTConfig(str(tmp_path), gradient_accumulation_steps=2, **SETTINGS)
    model = build_tiny_model("qwen2_5_vl", processor)
    trainer = StreamSFTTrainer(model=model, args=config, train_dataset=make_loader())
    assert trainer.processing_class is processor
    named = make_loader(processor=str(conformance_data / "processor"))
    trainer = StreamSFTTrainer(model, config, train_dataset=named)
    assert type(trainer.processing_class) is type(processor)


def test_checkpointed_activations_and_a_subclass_of_ones_own(make_loader, processor, tmp_path):
    from trl import SFTTrainer

    class Mine(StreamSFTMixin, SFTTrainer):
        pass

    settings = SETTINGS | {"gradient_checkpointing": True}  # as it is by default
    config = SFTConfig(str(tmp_path), gradient_accumulation_steps=2, max_steps=1, **settings)
    trainer = Mine(model=build_tiny_model("qwen2_5_vl", processor), args=config, train_dataset=make_loader())
    assert trainer.train().training_loss > 0


def test_adapters_train(make_loader, processor, tmp_path):
    peft = pytest.importorskip("peft")
    saving = {"save_strategy": "steps", "save_steps": 2}
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    model = build_tiny_model("qwen2_5_vl", processor)
    trainer = example.train(make_loader(), model, tmp_path, peft_config=config, **SETTINGS | saving)
    assert {
        name.rpartition("lora_")[1] for name, weight in trainer.model.named_parameters() if weight.requires_grad
    } == {"lora_"}
    again = example.train(
        make_loader(),
        build_tiny_model("qwen2_5_vl", processor),
        tmp_path,
        peft_config=config,
        resume=tmp_path / "checkpoint-2",
        **SETTINGS,
    )
    assert logged(again, "loss") == pytest.approx(logged(trainer, "loss"), rel=1e-6)


@pytest.mark.slow
@pytest.mark.trainers
def test_the_example_runs_from_the_command_line(conformance_data, processor, tmp_path, monkeypatch, capsys):
    build_tiny_model("qwen2_5_vl", processor).save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    shards = str(conformance_data / "shards")
    line = ["example", shards, str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--pack-size", "4000"]
    monkeypatch.setattr(sys, "argv", line)
    example.main()
    assert "loss after training: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"packing": True}, r"SFTConfig\(packing=True\) .* the loader packs already"),
        ({"padding_free": True}, r"SFTConfig\(padding_free=True\) .* packs have no padding already"),
        ({"assistant_only_loss": True}, r"SFTConfig\(assistant_only_loss=True\) .* labels what the assistant says"),
        ({"chat_template_path": "x.jinja"}, r"SFTConfig\(chat_template_path='x.jinja'\) .* its own processor"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps=1, but the loader plans"),
    ],
)
def test_what_the_loader_has_done_is_refused_as_a_setting(make_loader, processor, tmp_path, changes, sentence):
    config = SFTConfig(str(tmp_path), **SETTINGS | {"gradient_accumulation_steps": 2} | changes)
    with pytest.raises(ConfigError, match=sentence):
        StreamSFTTrainer(build_tiny_model("qwen2_5_vl", processor), config, train_dataset=make_loader())


def test_a_formatting_function_is_refused(make_loader, processor, tmp_path):
    config = SFTConfig(str(tmp_path), gradient_accumulation_steps=2, **SETTINGS)
    model = build_tiny_model("qwen2_5_vl", processor)
    with pytest.raises(ConfigError, match=r"formatting_func is for text that TRL prepares itself, .* never be called"):
        StreamSFTTrainer(model, config, train_dataset=make_loader(), formatting_func=str)


def test_a_loader_for_evaluation_alone_is_refused(make_loader, processor, tmp_path):
    from datasets import Dataset

    config = SFTConfig(str(tmp_path), **SETTINGS)
    model = build_tiny_model("qwen2_5_vl", processor)
    with pytest.raises(ConfigError, match="eval_dataset is a StreamLoader and train_dataset is not"):
        StreamSFTTrainer(
            model, config, train_dataset=Dataset.from_dict({"text": ["a"]}), eval_dataset=make_loader(train=False)
        )


def test_a_missing_package_is_named():
    code = "import sys; sys.modules['trl'] = None; import vlm_stream.integrations.trl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "StreamSFTTrainer needs the package 'trl', which is not installed" in done.stderr
    assert "pip install 'vlm-stream[trainers]'" in done.stderr
