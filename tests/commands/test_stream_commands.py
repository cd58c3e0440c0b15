"""plan, where, replay and bench, as people call them."""

import doctest
import json
import math
import os
import re

import pytest
import torch

from vlm_stream import StreamLoader
from vlm_stream.blueprint import Work
from vlm_stream.cli import main
from vlm_stream.commands import bench, size
from vlm_stream.commands.output import print_table
from vlm_stream.dispatch import CostModel

PLAN_NUMBERS = {
    *("fill", "packs", "packs_lower_bound", "steps", "padding", "dropped", "live_shards", "variance_inflation"),
    *("llm_imbalance_step", "vit_imbalance_step", "llm_imbalance_micro", "vit_imbalance_micro"),
    *("state_bytes", "requests_per_sample"),
}


def call(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_plan_gives_every_number_and_agrees_with_the_loader(capsys, toy_shards, processor):
    code, out, _ = call(capsys, "plan", toy_shards, "--pack-size", 1024, "--world", 2, "--json")
    report = json.loads(out)
    assert code == 0
    assert report.keys() >= PLAN_NUMBERS
    batches = list(StreamLoader(toy_shards, processor=processor, pack_size=1024, rank=0, world_size=2))
    assert report["steps"] == len(batches)
    assert report["samples"] == 60


def test_plan_prints_a_table_with_a_column_for_each_value(capsys, toy_shards):
    code, out, _ = call(capsys, "plan", toy_shards, "--pack-size", 1024, "--sweep", "window=8,64", "--max-steps", 5)
    assert code == 0
    assert "window=8" in out
    assert "window=64" in out
    assert "fill / padding" in out


def test_plan_says_so_where_nothing_is_left_to_train_on(capsys, toy_shards):
    code, out, err = call(capsys, "plan", toy_shards, "--pack-size", 16)
    assert code == 1
    assert "60 too_long" in out
    assert "error: no sample is left to train on (60 too_long)" in err
    assert json.loads(call(capsys, "plan", toy_shards, "--pack-size", 16, "--json")[1])["dropped"] == {"too_long": 60}
    code, _, err = call(capsys, "plan", toy_shards, "--sweep", "pack_size=16,1024")
    assert code == 1
    assert "(60 too_long; pack_size=16)" in err


def test_steps_per_epoch_are_not_rounded(capsys, toy_shards):
    _, out, _ = call(capsys, "plan", toy_shards, "--mode", "plain", "--world", "8")
    assert re.search(r"steps +│ +8 ", out)
    assert re.search(r"steps per epoch +│ +7\.5 ", out)


def test_plan_counts_builders_with_the_costs_that_bench_has_saved(capsys, tmp_path, toy_shards, saved_processor):
    plan = ["plan", toy_shards, "--pack-size", 1024, "--world", 2, "--step-seconds", 0.01]
    code, out, _ = call(capsys, *plan)
    assert code == 0
    assert "a guess; measure it: bench --save-costs FILE" in out
    assert "builders for steps of 0.01 s" in out
    bench = ["bench", toy_shards, "--processor", saved_processor, "--pack-size", 1024, "--save-costs", tmp_path / "c"]
    code, _, err = call(capsys, *bench, "--batches", 2)
    assert code == 2
    assert "0 batches were built by workers" in err
    code, _, _ = call(capsys, *bench, "--set", "num_workers=1", "--set", "epochs=2", "--quiet")
    saved = json.loads((tmp_path / "c").read_text())
    code_of_folder, _, err = call(
        capsys, *bench[:-1], tmp_path, "--set", "num_workers=1", "--set", "epochs=2", "--quiet"
    )
    assert code_of_folder == 2
    assert f"the costs cannot be written to {tmp_path} (Is a directory)" in " ".join(err.split())
    assert (code, saved["batches"] > 16) == (0, True)
    found = json.loads(call(capsys, *plan, "--json", "--costs", tmp_path / "c")[1])
    assert found["core_seconds_per_step"] > 0
    assert found["builders"] == max(math.ceil(found["core_seconds_per_step"] / 0.01 / 0.8), 1)
    for stage in ("encode", "collate"):
        saved[stage] = {name: 2 * weight for name, weight in saved[stage].items()}
    (tmp_path / "c").write_text(json.dumps(saved))
    twice = json.loads(call(capsys, *plan, "--json", "--costs", tmp_path / "c")[1])
    assert twice["core_seconds_per_step"] == pytest.approx(2 * found["core_seconds_per_step"])
    (tmp_path / "c").write_text("{}")
    code, _, err = call(capsys, *plan, "--costs", tmp_path / "c")
    assert code == 2
    assert "no costs of building" in err


def test_size_says_how_many_cores_are_needed(capsys, toy_shards, saved_processor, monkeypatch):
    size = [
        "size",
        toy_shards,
        "--processor",
        saved_processor,
        "--pack-size",
        512,
        "--step-seconds",
        0.5,
        "--seconds",
        0.1,
    ]
    code, _, err = call(capsys, *size, "--pack-size", 8192)
    assert code == 2
    assert "4 are needed to say what one costs; measure more epochs" in err
    code, out, _ = call(
        capsys, *size, "--gpus", 2, "--world", 1, "--set", "micro_batches=2", "--set", "epochs=2", "--json"
    )
    found = json.loads(out)
    assert (code, found["batches_measured"] > 3) == (0, True)
    assert found["core_seconds_per_step"] == pytest.approx(2 * found["core_seconds_per_batch"])
    assert found["cores"] == found["workers_per_rank"] == math.ceil(found["core_seconds_per_step"] / 0.5 / 0.8)
    assert found["cores_per_node"] == pytest.approx(2 * found["cores_per_gpu"])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})  # of a larger machine, perhaps
    code, out, _ = call(capsys, *size, "--set", "epochs=2")
    assert code == 0
    assert "GPUs that a machine like this one feeds (3 cores)" in out
    assert "cores for steps of 0.5 s on 1 GPU" in out
    assert "--gpus-per-node are above 0, or there is nothing to be sized" in call(capsys, *size, "--gpus", 0)[2]


def test_what_is_measured_and_what_the_index_tells_go_together():
    """A mean batch of twice the work of those measured takes twice the time."""
    model = CostModel()
    measured = size._Measured(model)
    light, heavy = (Work(samples=1, tokens=1000, num_bytes=0, image_pixels=0, video_pixels=n) for n in (0, 10**8))
    measured.works = [light] * 8 + [heavy] * 8
    measured.cpu_s = [3 * model.core_seconds(light)] * 8
    seconds, error = measured.batch_seconds()
    assert seconds == pytest.approx(3 * (model.core_seconds(light) + model.core_seconds(heavy)) / 2)
    assert error == pytest.approx(0, abs=1e-9)


def test_where_names_what_the_loader_delivers(capsys, toy_shards, processor):
    loader = StreamLoader(toy_shards, processor=processor, pack_size=1024, with_refs=True)
    batches = list(loader)
    code, out, _ = call(capsys, "where", toy_shards, "--pack-size", 1024, "--step", 3, "--json")
    lines = json.loads(out)["samples"]
    named = [(line["shard"], line["key"], line["entry"], line["id"]) for line in lines]
    assert code == 0
    assert named == [name[1:] for row in batches[3]["refs"] for name in row]
    key = named[-1][1]
    code, out, _ = call(capsys, "where", toy_shards, "--pack-size", 1024, "--key", key, "--json")
    (line,) = json.loads(out)["samples"]
    assert (line["step"], line["rank"], line["key"], line["found_by"]) == (3, 0, key, "key")
    own = next(line for line in lines if line["id"])
    code, out, _ = call(capsys, "where", toy_shards, "--pack-size", 1024, "--key", own["id"], "--json")
    assert json.loads(out)["samples"] == [own | {"found_by": "id"}]
    code, out, _ = call(capsys, "where", toy_shards, "--pack-size", 1024, "--step", 3)
    assert key in out


@pytest.fixture(scope="module")
def second_round(toy_shards, processor):
    """A loader in the middle of its second epoch, and what it delivers next."""
    loader = StreamLoader(toy_shards, processor=processor, pack_size=1024, with_refs=True)
    for _ in loader:
        pass
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    return state, [(name[1], name[2]) for row in next(batches)["refs"] for name in row]


def save_json(state, folder):
    (folder / "state.json").write_text(json.dumps(state))
    return folder / "state.json"


def save_bare_text(state, folder):
    (folder / "bare.json").write_text(state["vlm_stream"])
    return folder / "bare.json"


def save_as_the_readme_says(state, folder):
    torch.save({"model": {"weight": torch.zeros(3)}, "data": state}, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def save_with_a_new_eval_loader(state, folder):
    nothing = StreamLoader("nowhere", processor=None, pack_size=8).state_dict()
    torch.save({"loops": [{"train": state}, {"eval": nothing}]}, folder / "checkpoint.ckpt")
    return folder / "checkpoint.ckpt"


def save_distributed(state, folder):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": {"weight": torch.zeros(3)}, "data": state}, checkpoint_id=folder / "step-7", no_dist=True)
    return folder / "step-7"


def save_as_transformers_does(state, folder):
    (folder / "checkpoint-3").mkdir()
    (folder / "checkpoint-3" / "vlm_stream.json").write_text(json.dumps(state))
    return folder / "checkpoint-3"


@pytest.mark.filterwarnings("ignore:torch.distributed is .*intent is to save in a single process")
@pytest.mark.parametrize(
    "save",
    [
        save_json,
        save_bare_text,
        save_as_the_readme_says,
        save_with_a_new_eval_loader,
        save_distributed,
        save_as_transformers_does,
    ],
)
def test_where_goes_on_from_whatever_a_state_was_saved_in(capsys, toy_shards, second_round, save, tmp_path):
    state, following = second_round
    step = json.loads(state["vlm_stream"])["state"]["plan"]["delivered"][0]
    arguments = ["--pack-size", 1024, "--state", save(state, tmp_path), "--step", step, "--json"]
    code, out, _ = call(capsys, "where", toy_shards, *arguments)
    assert code == 0
    assert [(line["shard"], line["key"]) for line in json.loads(out)["samples"]] == following


def test_states_that_cannot_be_meant_are_refused(capsys, toy_shards, second_round, tmp_path):
    state, _ = second_round
    torch.save({"model": torch.zeros(2)}, tmp_path / "model.pt")
    loader = StreamLoader(toy_shards, processor=None, pack_size=1024)
    next(iter(loader))
    torch.save([state, loader.state_dict()], tmp_path / "two.pt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").write_text("hello")
    (tmp_path / "cut.pt").touch()
    messages = {
        "model.pt": "holds no state of a loader",
        "two.pt": "holds the states of 2 loaders",
        "empty": "is no checkpoint with a loader's state in it",
        "text.txt": "is neither JSON nor a file of torch.save",
        "cut.pt": "is neither JSON nor a file of torch.save",
    }
    for name, message in messages.items():
        code, _, err = call(capsys, "where", toy_shards, "--pack-size", 1024, "--state", tmp_path / name, "--step", 1)
        assert code == 2
        assert message in " ".join(err.split())


def test_where_cuts_no_name_and_knows_its_ranks(capsys, toy_shards, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    code, out, _ = call(capsys, "where", toy_shards, "--pack-size", 1024, "--step", 1)
    assert code == 0
    assert "shard-00000" in out
    assert "…" not in out
    code, _, err = call(capsys, "where", toy_shards, "--pack-size", 1024, "--step", 1, "--world", 8, "--rank", 9)
    assert code == 2
    assert "there is no rank 9 among 8" in err


def test_replay_rebuilds_a_batch_from_a_state(capsys, toy_shards, processor, saved_processor, tmp_path):
    loader = StreamLoader(toy_shards, processor=processor, pack_size=1024)
    batches = []
    for number, batch in enumerate(loader):
        batches.append(batch)
        if number == 1:
            (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    arguments = ["--processor", saved_processor, "--pack-size", 1024, "--state", tmp_path / "state.json"]
    code, out, _ = call(capsys, "replay", toy_shards, *arguments, "--step", 4, "--out", tmp_path / "batch.pt", "--json")
    assert code == 0
    assert json.loads(out)["batches"] == 1
    (replayed,) = torch.load(tmp_path / "batch.pt", weights_only=False)
    for name, value in batches[4].items():
        assert torch.equal(replayed[name], value), name


def test_replay_says_where_it_cannot_write(capsys, toy_shards, saved_processor, tmp_path):
    made = ("replay", toy_shards, "--pack-size", 1024, "--processor", saved_processor, "--step", 0)
    for out, why in ((tmp_path, "Is a directory"), (tmp_path / "no" / "batch.pt", "No such file or directory")):
        code, _, err = call(capsys, *made, "--out", out)
        assert code == 2
        assert f"the batches cannot be written to {out} ({why}); choose another --out" in " ".join(err.split())


@pytest.mark.parametrize(
    "wrong",
    [
        ["plan", "--max-steps", "0"],
        ["plan", "--world", "-1"],
        ["where", "--world", "0", "--step", "1"],
        ["bench", "--batches", "-1"],
        ["bench", "--seconds", "nan"],
        ["size", "--step-seconds", "1", "--seconds", "0"],
        ["chaos", "--world", "0"],
        ["chaos", "--minutes", "-1"],
        ["chaos", "--patience", "soon"],
    ],
)
def test_numbers_that_count_nothing_are_refused(capsys, toy_shards, wrong):
    with pytest.raises(SystemExit, match="2"):
        call(capsys, wrong[0], toy_shards, "--pack-size", 1024, *wrong[1:])
    assert "at least 1" in (err := capsys.readouterr().err) or "above 0" in err


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_replay_finishes_pixels_as_a_loader_with_a_device_does(
    capsys, toy_shards, processor, saved_processor, tmp_path, dtype
):
    with StreamLoader(toy_shards, processor=processor, pack_size=1024, device="cpu", dtype=dtype) as loader:
        expected = next(iter(loader))
    recipe = ["--pack-size", 1024, "--set", "device=cuda", *(["--set", f"dtype={dtype}"] if dtype else [])]
    arguments = ["--processor", saved_processor, *recipe, "--step", 0, "--out", tmp_path / "batch.pt"]
    code, out, _ = call(capsys, "replay", toy_shards, *arguments)
    assert code == 0
    assert f"pixels: finished on the CPU as {dtype or 'bfloat16'}" in out
    (replayed,) = torch.load(tmp_path / "batch.pt", weights_only=False)
    assert replayed.keys() == expected.keys() | {"refs"}
    for name, value in expected.items():
        assert torch.equal(replayed[name], value), name


def test_bench_runs_a_loader_and_prints_its_numbers(capsys, toy_shards, saved_processor):
    arguments = ["--processor", saved_processor, "--pack-size", 1024, "--set", "num_workers=1", "--batches", 3]
    code, out, err = call(capsys, "bench", toy_shards, *arguments)
    assert code == 0
    assert "samples/s" in out
    assert "encode, s/batch" in out
    assert "_" not in out
    assert "bench: batches 1, samples/s" in err
    code, out, _ = call(capsys, "bench", toy_shards, *arguments, "--json")
    assert json.loads(out)["batches"] == 3


def test_bench_counts_from_the_first_batch(capsys, toy_shards, saved_processor):
    arguments = ["--processor", saved_processor, "--pack-size", 1024, "--set", "num_workers=1"]
    _, out, _ = call(capsys, "bench", toy_shards, *arguments, "--seconds", 1e-9, "--json")
    numbers = json.loads(out)
    assert numbers["batches"] == 1  # however long the start took
    _, out, _ = call(capsys, "bench", toy_shards, *arguments, "--json")
    numbers = json.loads(out)
    assert numbers["start_seconds"] > 0
    # Of 60 samples those of the first batch are not in the rate.
    assert 0 < numbers["samples_per_s"] * numbers["seconds"] < 59.5


def test_numbers_are_shown_without_powers_of_ten():
    assert doctest.testmod(bench).attempted > 0
    assert doctest.testmod(bench).failed == 0


def test_tables_are_never_cut(capsys):
    print_table("title", {"shard": "s3://" + "b" * 200})
    assert "s3://" + "b" * 200 in capsys.readouterr().out


def test_a_recipe_may_stand_where_datasets_do(capsys, toy_shards, saved_processor, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"sources: {toy_shards}\nprocessor: {saved_processor}\npack_size: 1024\n")
    code, out, _ = call(capsys, "bench", recipe, "--batches", 2, "--json")
    assert code == 0
    assert json.loads(out)["batches"] == 2
    code, out, _ = call(capsys, "plan", "--config", recipe, "--json")
    assert json.loads(out)["samples"] == 60


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan"], "no dataset was named"),
        (["plan", "a.yaml", "--config", "b.yaml"], "two recipes were named (a.yaml, b.yaml)"),
        (["plan", "a.yaml", "b.yaml"], "two recipes were named (a.yaml, b.yaml)"),
        (["plan", "DATA"], "mode='packed' without pack_size"),
        (["plan", "DATA", "--pack-size", "1024", "--sweep", "window"], "names no values"),
        (["plan", "DATA", "--pack-size", "1024", "--set", "windw=3"], "there is no option 'windw'; did you mean"),
        (["plan", "DATA", "--pack-size", "1024", "--set", "epochs=null"], "the plan has no end"),
        (["plan", "DATA", "--pack-size", "1024", "--set", "num_workers=x"], "num_workers is 'x', which it cannot be"),
        (["plan", "DATA", "--pack-size", "1024", "--set", "x"], "has no '='"),
        (
            ["where", "DATA", "--pack-size", "1024", "--key", "nobody"],
            "with the key or the id 'nobody'",
        ),
        (["where", "DATA", "--pack-size", "1024", "--step", "9999"], "Step 9999 is not ahead"),
        (["where", "DATA", "--pack-size", "1024", "--step", "1", "--state", "no.json"], "the state no.json cannot"),
        (["replay", "DATA", "--pack-size", "1024", "--step", "1", "--out", "x.pt"], "without a processor"),
        (["bench", "DATA", "--pack-size", "1024"], "without a processor"),
    ],
)
def test_what_cannot_be_meant_ends_with_a_sentence_and_code_2(capsys, toy_shards, arguments, sentence):
    code, _, err = call(capsys, *(str(toy_shards) if argument == "DATA" else argument for argument in arguments))
    assert code == 2
    assert sentence in err


def test_a_folder_without_a_dataset_cannot_be_used(capsys, tmp_path):
    code, _, err = call(capsys, "plan", tmp_path, "--pack-size", 8)
    assert code == 2
    assert "has no dataset.json" in err
