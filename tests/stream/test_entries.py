"""Entries of one dataset as sources of a mixture: exactly once, by weight, over resumes, and named everywhere."""

from __future__ import annotations

import json
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlm_stream import StreamLoader
from vlm_stream.cli import main
from vlm_stream.convert import make_shards
from vlm_stream.errors import ConfigError, StateError
from vlm_stream.format import IndexCache, OpenDataset
from vlm_stream.options import StreamOptions
from vlm_stream.planning import open_plan
from vlm_stream.recipe import normalise_sources

if TYPE_CHECKING:
    from pathlib import Path

    Capture = pytest.CaptureFixture[str]

SIZES = {"captions": 30, "clips": 7, "dialogues": 23}


def loader_of(shards: Path, weights: dict[str, float], **options: Any) -> StreamLoader:
    sources = {"shards": {"url": str(shards), "weights": weights}}
    settings = {"mode": "plain", "batch_size": 2, "stop": "each", "window": 16, "num_workers": 0, **options}
    return StreamLoader(sources, processor=None, **settings)


def names(batches: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(sample.source, sample.entry, sample.key) for batch in batches for sample in batch["samples"]]


def test_each_entry_is_a_source_and_comes_whole(mixed_shards: Path, toy_shards: Path) -> None:
    for shards in (mixed_shards, toy_shards):
        found = names(list(loader_of(shards, {"captions": 2, "clips": 1, "dialogues": 0.5})))
        assert len(set(found)) == len(found) == 60
        assert Counter(entry for _, entry, _ in found) == SIZES
        assert all(source == f"shards:{entry}" for source, entry, _ in found)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_named_sample_comes_once_however_a_run_is_cut(mixed_shards: Path, data: st.DataObject) -> None:
    weights = {entry: data.draw(st.sampled_from([0, 0.1, 1, 3]), label=entry) for entry in SIZES}
    weights["captions"] = weights["captions"] or 1
    options = {"pack_size": 2048, "mode": "packed"} if data.draw(st.booleans(), label="packed") else {}
    delivered: list[tuple[str, str, str]] = []
    state = None
    while True:
        world = data.draw(st.integers(1, 3), label="world")
        loaders = [loader_of(mixed_shards, weights, rank=rank, world_size=world, **options) for rank in range(world)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        num_batches = data.draw(st.integers(1, 8), label="batches")
        for _ in range(num_batches):
            batches = [next(iterator, None) for iterator in iterators]
            if batches[0] is None:
                counts = Counter(delivered)
                assert set(counts.values()) <= {1}
                assert Counter(entry for _, entry, _ in counts) == {e: n for e, n in SIZES.items() if weights[e]}
                return
            for batch in batches:
                rows = batch["samples"]
                delivered += [(s.source, s.entry, s.key) for row in rows for s in (row if options else [row])]
        states = [loader.state_dict() for loader in loaders]
        assert all(each == states[0] for each in states)
        state = json.loads(json.dumps(states[0]))


@pytest.mark.parametrize(
    "weights", [{"captions": 2, "clips": 1, "dialogues": 1}, {"captions": 1, "clips": 0, "dialogues": 9}]
)
def test_what_is_drawn_follows_the_weights(mixed_shards: Path, weights: dict[str, float]) -> None:
    loader = loader_of(mixed_shards, weights, stop="never", batch_size=10)
    found = Counter(entry for _, entry, _ in names([batch for _, batch in zip(range(200), loader, strict=False)]))
    for entry, weight in weights.items():
        assert found[entry] / 2000 == pytest.approx(weight / sum(weights.values()), abs=0.01)


def test_entries_share_the_weight_of_their_dataset(mixed_shards: Path, toy_shards: Path) -> None:
    sources = {
        "a": {"url": mixed_shards, "weight": 1, "weights": {"captions": 3, "clips": 0, "dialogues": 1}},
        "b": {"url": toy_shards, "weight": 3},
    }
    plan = open_plan(normalise_sources(sources), StreamOptions(mode="plain"))
    assert [(source.name, source.weight) for source in plan.datasets.sources] == [
        ("a:captions", 0.75),
        ("a:dialogues", 0.25),
        ("b", 3),
    ]


def test_the_index_of_two_entries_is_kept_once(mixed_shards: Path) -> None:
    def kept(weights: dict[str, float]) -> int:
        sources = normalise_sources({"url": mixed_shards, "weights": weights})
        plan = open_plan(sources, StreamOptions(mode="plain", stop="each"))
        for step in plan.planner.steps(plan.build.options.shape(1)):
            plan.datasets.draw([ref for row in step.refs(0, 0) for ref in row])
        return plan.datasets.opened[0]._cache.num_bytes

    assert kept({"captions": 1, "clips": 0, "dialogues": 1}) == kept({"captions": 1, "clips": 0, "dialogues": 0}) > 0


def test_other_weights_go_on_from_a_state_and_other_entries_are_refused(mixed_shards: Path) -> None:
    loader = loader_of(mixed_shards, {"captions": 2, "clips": 1, "dialogues": 1})
    batches = iter(loader)
    before = names([next(batches) for _ in range(5)])
    state = loader.state_dict()
    other = loader_of(mixed_shards, {"captions": 1, "clips": 1, "dialogues": 5})
    other.load_state_dict(state)
    assert sorted(before + names(list(other))) == sorted(
        set(before) | set(names(list(loader_of(mixed_shards, dict.fromkeys(SIZES, 1)))))
    )
    fewer = loader_of(mixed_shards, {"captions": 1, "clips": 0, "dialogues": 5})
    fewer.load_state_dict(state)
    with pytest.raises(StateError, match="shards:clips"):
        next(iter(fewer))


def test_weight_0_is_said_once(mixed_shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loader = loader_of(mixed_shards, {"captions": 1, "clips": 0, "dialogues": 0})
        assert {entry for _ in range(2) for _, entry, _ in names(list(loader))} == {"captions"}
    said = [record.getMessage() for record in caplog.records if "weight 0" in record.getMessage()]
    assert said == [f"clips, dialogues of {mixed_shards} have the weight 0: their 30 samples are left out"]


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({"captions": 1, "clips": 1}, "do not name 'dialogues', so .* with the weight 0 to leave one out"),
        ({"captions": 1}, "do not name 'clips', 'dialogues', so .* draw from them"),
        ({"captions": 1, "clip": 1, "dialogues": 1}, "has no entry 'clip'; did you mean 'clips'"),
        ({"captions": -1}, "the weight -1 for 'captions', but it must be a number of 0 or more"),
        ({"captions": 0, "clips": 0}, "all 0, so nothing of it would be drawn"),
        (["captions"], "give a number for each entry"),
    ],
)
def test_weights_that_cannot_be_meant_are_refused(mixed_shards: Path, weights: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        next(iter(loader_of(mixed_shards, weights)))


@pytest.fixture(scope="module")
def recipe(mixed_shards: Path, saved_processor: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(
        f"sources: {{url: '{mixed_shards}', weights: {{captions: 2, clips: 0, dialogues: 1}}}}\n"
        f"processor: {saved_processor}\nmode: plain\nbatch_size: 4\nstop: each\n"
    )
    return path


def test_commands_name_entries(recipe: Path, mixed_shards: Path, capsys: Capture, tmp_path: Path) -> None:
    def call(*arguments: object) -> tuple[int, Any]:
        code = main([str(argument) for argument in arguments])
        return code, capsys.readouterr().out

    code, out = call("plan", recipe, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["samples_by_source"] == {"data:captions": 30, "data:dialogues": 23}
    captions = report["entries"]["data:captions"]["captions"]
    assert (captions["samples"], captions["images"] > 0, captions["videos"]) == (30, True, 0)
    assert captions["samples_share"] == pytest.approx(30 / 53)
    code, out = call("plan", recipe)
    assert "from captions" in out
    assert "56.6% of samples" in out

    code, out = call("where", recipe, "--step", 2, "--json")
    lines = json.loads(out)["samples"]
    dataset = OpenDataset(str(mixed_shards), None, IndexCache())
    for line in lines:
        assert line["source"] == f"data:{line['entry']}"
        ((shard, row),) = dataset.find(line["key"])
        (drawn,) = dataset.draw(shard, [row])
        assert (drawn.entry, drawn.id, drawn.span.path) == (line["entry"], line["id"], line["shard"])
    code, out = call("where", recipe, "--key", lines[0]["id"], "--json")
    assert json.loads(out)["samples"] == [lines[0] | {"found_by": "id"}]
    code, _ = call("replay", recipe, "--step", 2, "--out", tmp_path / "batch.pt", "--json")
    import torch

    (batch,) = torch.load(tmp_path / "batch.pt", weights_only=False)
    assert [name[2] for row in batch["refs"] for name in row] == [line["key"] for line in lines]


def test_stats_add_up_entry_by_entry(
    mixed_shards: Path, saved_processor: Path, capsys: Capture, tmp_path: Path
) -> None:
    page = tmp_path / "stats.html"
    assert main(["stats", str(mixed_shards), "--processor", str(saved_processor), "--html", str(page), "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)
    assert {name: entry["totals"]["samples"] for name, entry in stats["entries"].items()} == SIZES
    for name in ("text_tokens", "images", "videos", "audios", "image_pixels", "label_tokens"):
        assert sum(entry["totals"][name] for entry in stats["entries"].values()) == stats["totals"][name]
    lengths = next(each for each in stats["histograms"] if each["name"] == "sample length")
    assert sum(entry["length"] for entry in stats["entries"].values()) == lengths["total"]
    assert "<td>captions</td><td>30 (50.0%)</td>" in page.read_text()
    assert main(["stats", str(mixed_shards), "--json"]) == 0  # for the processor of the conversion, by the manifest
    assert lengths in json.loads(capsys.readouterr().out)["histograms"]
    assert main(["stats", str(mixed_shards)]) == 0
    assert "dialogues" in capsys.readouterr().out


def test_samples_of_one_id_are_listed_and_a_record_without_an_id_has_none(tmp_path: Path, capsys: Capture) -> None:
    lines = [
        {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": "yes"}]}
        | ({} if number == 4 else {"id": "s1894" if number % 2 else number})
        for number in range(6)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_shards(tmp_path / "chat.jsonl", tmp_path / "out", samples_per_shard=2)
    assert main(["where", str(tmp_path / "out"), "--set", "mode=plain", "--key", "s1894", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["samples"]
    assert sorted(line["key"] for line in found) == ["000000001", "000000003", "000000005"]
    assert {(line["id"], line["found_by"], line["entry"]) for line in found} == {("s1894", "id", "chat")}
    loader = StreamLoader(tmp_path / "out", processor=None, mode="plain", batch_size=6, shuffle=False)
    assert [sample.id for sample in next(iter(loader))["samples"]] == ["0", "s1894", "2", "s1894", None, "s1894"]
