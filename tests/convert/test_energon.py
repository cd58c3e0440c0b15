"""Energon's datasets and blends are sources as they are; code that they bring along is not run."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import yaml

from tests.foreign_tars import write_energon
from vlm_stream import StreamLoader
from vlm_stream.cli import main
from vlm_stream.convert import open_blends
from vlm_stream.errors import ConfigError, DatasetError, VlmStreamError
from vlm_stream.format import FieldMap, to_conversation
from vlm_stream.recipe import normalise_sources
from vlm_stream.storage import StoreOptions, open_store
from vlm_stream.testing import make_jpeg, make_mp4

CAPTIONS = {
    "sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"},
    "field_map": {"image": "jpg,png", "caption": "txt"},
}


def captions(*numbers: int, size: int = 5) -> dict[str, list[tuple[str, dict[str, bytes]]]]:
    image = make_jpeg(40, 50)
    return {
        f"shard_{n}.tar": [(f"{n}{k:03d}", {"jpg": image, "txt": f"words {n}{k}".encode()}) for k in range(size)]
        for n in numbers
    }


@pytest.fixture
def dataset(tmp_path):
    splits = {"train": ["shard_{0..1}.tar"], "val": ["shard_2.tar"], "test": []}
    return write_energon(tmp_path / "caps", captions(0, 1, 2), splits, CAPTIONS, exclude=["shard_1.tar/1003"])


def samples_of(url, **options):
    loader = StreamLoader(url, processor=None, mode="plain", batch_size=4, **options)
    return [sample for batch in loader for sample in batch["samples"]]


def keys_of(url, **options):
    return sorted(sample.key for sample in samples_of(url, **options))


def test_splits_are_energons_own(dataset, caplog):
    expected = [f"0{k:03d}" for k in range(5)] + [f"1{k:03d}" for k in (0, 1, 2, 4)]
    assert keys_of(dataset) == keys_of(f"{dataset}#train") == expected
    assert "1 convert: excluded" in caplog.text
    assert keys_of(f"{dataset}/#val") == [f"2{k:03d}" for k in range(5)]
    assert keys_of({"val": {"url": f"{dataset}#val"}}) == [f"2{k:03d}" for k in range(5)]


def test_a_split_that_is_not_there_is_named_with_those_that_are(dataset):
    for split in ("test", "dev"):
        with pytest.raises(ConfigError, match=rf"no tars in the split '{split}'.*its splits are train, val"):
            keys_of(f"{dataset}#{split}")
    with pytest.raises(ConfigError, match=r"'size' behind its split"):
        keys_of(f"{dataset}#train;size=3")


def test_a_sample_is_encoded_as_its_caption(dataset, processor):
    loader = StreamLoader(f"{dataset}#val", processor=processor, mode="plain", batch_size=5, with_refs=True)
    (batch,) = loader
    assert "words 2" in processor.tokenizer.decode(batch["input_ids"][0])
    assert batch["pixel_values"].shape[0] > 0


def test_other_files_of_the_notes_can_be_named(dataset):
    notes = dataset / ".nv-meta"
    (notes / "small.yaml").write_text(yaml.safe_dump({"split_parts": {"train": ["shard_2.tar"]}}))
    (notes / "texts.yaml").write_text(
        yaml.safe_dump({"sample_type": {"__class__": "TextSample"}, "field_map": {"text": "txt"}})
    )
    (sample, *_) = samples_of(f"{dataset}#train;split_config=small.yaml;dataset_config=texts.yaml", shuffle=False)
    assert (sample.key, sample.conversation()) == (
        "2000",
        [{"role": "assistant", "content": [{"type": "text", "text": "words 20"}]}],
    )


def test_old_notes_are_read(tmp_path):
    config = {"__module__": "megatron.energon", "__class__": "CaptioningWebdataset", **CAPTIONS, "subflavor": "old"}
    del config["sample_type"]
    folder = write_energon(tmp_path / "old", captions(0), {"train": ["shard_0.tar"]}, config)
    counts = json.loads((folder / ".nv-meta" / ".info.json").read_text())
    (folder / ".nv-meta" / ".info.json").unlink()
    (folder / ".nv-meta" / ".info.yaml").write_text(yaml.safe_dump({"shard_counts": counts["shard_counts"]}))
    found = samples_of(folder)
    assert len(found) == 5
    assert found[0].fields.subflavors == {"__subflavor__": "old"}


def test_crude_samples_have_the_layout_that_they_show(tmp_path):
    crude = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    known = write_energon(tmp_path / "known", captions(0), {"train": ["shard_0.tar"]}, crude)
    assert samples_of(known)[0].fields.layout == "caption"
    odd = {"shard_0.tar": [("1", {"npy": bytes(8), "bin": b"x"})]}
    unknown = write_energon(tmp_path / "unknown", odd, {"train": ["shard_0.tar"]}, crude)
    assert bytes(samples_of(unknown)[0].members["bin"]) == b"x"


def test_code_of_a_dataset_is_not_run(tmp_path):
    config = {"sample_type": CAPTIONS["sample_type"], "sample_loader": "sample_loader.py:load", "part_filter": "x.py:f"}
    folder = write_energon(tmp_path / "code", captions(0), {"train": ["shard_0.tar"]}, config)
    (folder / ".nv-meta" / "sample_loader.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ConfigError, match=r"by code \(sample_loader.py:load\), which is not run here.*field_map"):
        keys_of(folder)
    assert len(keys_of(str(folder / "shard_0.tar"))) == 5  # the way out


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sample_type": {"__class__": "MySample"}, "field_map": {}}, "the type 'MySample', for which no conversation"),
        ({"sample_type": CAPTIONS["sample_type"], "field_map": {"image": "jpg"}}, "does not say where caption"),
    ],
)
def test_unknown_types_and_short_maps_are_refused(tmp_path, config, message):
    folder = write_energon(tmp_path / "d", captions(0), {"train": ["shard_0.tar"]}, config)
    with pytest.raises(ConfigError, match=message):
        keys_of(folder)


def turns(sample_type, field_map, **members):
    names = [name.replace("_", ".") for name in members]
    texts = {
        name: json.dumps(value).encode() if name.endswith("json") else value
        for name, value in zip(names, members.values(), strict=True)
        if value is not None
    }
    fields = FieldMap(layout="energon", columns=field_map, tags={"sample_type": sample_type}, prompt="Say it.")
    found = to_conversation(fields, names, texts)
    return [
        (turn["role"], [item.get("text") or (item["type"], item[item["type"]]) for item in turn["content"]])
        for turn in found
    ]


def test_each_sample_type_becomes_its_conversation():
    image = ("image", "jpg")
    qa = {"image": "jpg", "context": "json[q]", "answers": "json[a]", "answer_weights": "json[w]"}
    assert turns("VQASample", qa, jpg=None, json={"q": "Q?", "a": ["no", "yes"], "w": [0.2, 0.8]}) == [
        ("user", [image, "Q?"]),
        ("assistant", ["yes"]),
    ]
    assert turns("VQASample", qa, jpg=None, json={"q": "Q?", "a": ["no", "yes"]})[1] == ("assistant", ["no"])
    video = {"video": "mp4", "context": "q.txt", "answers": "a.txt"}
    assert turns("VidQASample", video, mp4=None, q_txt=b"Q?", a_txt=b"A\n") == [
        ("user", [("video", "mp4"), "Q?"]),
        ("assistant", ["A"]),
    ]
    choice = {"image": "jpg", "context": "json[0]", "choices": "json[1]", "correct_choice_idx": "json[2]"}
    assert turns("MultiChoiceVQASample", choice, jpg=None, json=["Q?", ["cat", "dog"], 1]) == [
        ("user", [image, "Q?\nA. cat\nB. dog"]),
        ("assistant", ["B. dog"]),
    ]
    assert turns("OCRSample", {"image": "png,jpg", "text": "txt"}, jpg=None, txt=b"STOP") == [
        ("user", [image, "Say it."]),
        ("assistant", ["STOP"]),
    ]
    named = {"image": "jpg", "label": "cls", "label_name": "json[name]"}
    assert turns("ImageClassificationSample", named, jpg=None, cls=b"3", json={"name": "owl"})[1] == (
        "assistant",
        ["owl"],
    )
    assert turns("ImageClassificationSample", named, jpg=None, cls=b"3")[1] == ("assistant", ["3"])
    sequence = {"sequence": "json[s]"}
    mixed = {"s": ["one", "0.jpg", "see x.jpg", {"type": "image", "image": "1.jpg"}]}
    assert turns("InterleavedSample", sequence, json=mixed, **{"0_jpg": None, "1_jpg": None}) == [
        ("assistant", ["one", ("image", "0.jpg"), "see x.jpg", ("image", "1.jpg")])
    ]
    similar = {
        "images": "json[i]",
        "texts": "json[t]",
        "similarity_matrix": "json[m]",
        "matched_text_indices": "json[x]",
    }
    data = {"i": ["0.jpg", "1.jpg"], "t": ["a", "b"]}
    order = [("assistant", ["a", ("image", "0.jpg"), ("image", "1.jpg"), "b"])]
    for match in ({"x": [1, 1]}, {"m": [[0.1, 0.9], [0.2, 0.3]]}):
        found = turns("SimilarityInterleavedSample", similar, json=data | match, **{"0_jpg": None, "1_jpg": None})
        assert found == order


def test_bad_samples_are_left_out_and_named(tmp_path):
    tars = captions(0)
    tars["shard_0.tar"] += [("bad", {"jpg": make_jpeg(20, 20)}), ("odd", {"txt": b"no image"})]
    folder = write_energon(tmp_path / "d", tars, {"train": ["shard_0.tar"]}, CAPTIONS)
    assert len(keys_of(folder)) == 5
    (ledger,) = folder.glob(".vlm_stream/*/ledger.jsonl")
    assert {json.loads(line)["sample"] for line in ledger.read_text().splitlines()} == {"bad", "odd"}


@pytest.fixture
def blend(tmp_path):
    """Three datasets and a place for a YAML file above them."""
    for name, numbers in (("a", (0, 1)), ("b", (2,)), ("c", (3,))):
        splits = {"train": [f"shard_{n}.tar" for n in numbers], "val": [f"shard_{numbers[-1]}.tar"]}
        write_energon(tmp_path / name, captions(*numbers, size=20), splits, CAPTIONS | {"subflavors": {"from": name}})

    def write(splits, name="blend.yaml", kind="MetadatasetV2"):
        path = tmp_path / name
        path.write_text(yaml.safe_dump({"__module__": "megatron.energon", "__class__": kind, "splits": splits}))
        return path

    return write


@pytest.mark.parametrize(
    ("kind", "key"), [("Metadataset", "datasets"), ("Metadataset", "blend"), ("MetadatasetV2", "blend")]
)
def test_a_blend_is_a_mixture_with_its_weights(blend, kind, key):
    entries = [{"weight": 3, "path": "./a"}, {"weight": 1, "path": "b", "subflavors": {"from": "outside", "x": 1}}]
    path = blend({"train": {key: entries}, "val": {"path": "./c"}}, kind=kind)
    found = samples_of(path)
    counts = Counter(sample.source for sample in found)
    assert set(counts) == {"data/a", "data/b"}
    assert counts["data/a"] == 40  # the mixture ends with the first that is used up
    assert 11 <= counts["data/b"] <= 14
    assert {sample.source: sample.fields.subflavors for sample in found} == {
        "data/a": {"from": "a"},
        "data/b": {"from": "outside", "x": 1},
    }
    assert keys_of(f"{path}#val") == sorted(f"3{k:03d}" for k in range(20))


def test_nested_blends_multiply_their_weights(blend):
    blend({"train": {"blend": [{"weight": 1, "path": "b"}, {"weight": 3, "path": "c"}]}}, "inner.yaml")
    path = blend(
        {"train": {"blend": [{"weight": 1, "path": "a", "split_part": "val"}, {"weight": 1, "path": "inner.yaml"}]}}
    )
    loader = StreamLoader({"mix": {"url": str(path), "weight": 2}}, processor=None, mode="plain")
    opened = loader.stream.plan().datasets.sources
    assert {source.name: source.weight for source in opened} == {"mix/a": 1.0, "mix/b": 0.25, "mix/c": 0.75}
    assert opened[0].url.endswith("a#val")


def test_an_epochized_blend_repeats_samples(blend):
    path = blend({"train": {"blend_epochized": [{"repetitions": 2, "path": "b"}, {"repetitions": 0.5, "path": "c"}]}})
    counts = Counter(sample.source for sample in samples_of(path))
    assert counts == {"data/b": 40, "data/c": 10}
    with pytest.raises(ConfigError, match=r"gives its datasets repetitions instead of weights"):
        keys_of({"mix": {"url": str(path), "weight": 2}})


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"join": [{"path": "a"}, {"path": "b"}]}, "has 'join', which only Energon itself can follow"),
        ({"path": "a", "subset": {"range": ["0%", "50%"]}}, "has 'subset'"),
        ({"blend": [{"weight": 1, "path": "x.jsonl"}]}, "records lie outside of tars"),
        ({"blend": []}, "empty blend"),
        ({"blend": [{"weight": "many", "path": "a"}]}, "not numbers above 0"),
        ({"blend": [{"weight": 1, "path": "inner.yaml"}]}, "blend and blend_epochized inside one another"),
        ({"path": "blend.yaml"}, "one of them holds itself"),
    ],
)
def test_what_only_energon_can_do_is_refused(blend, node, message):
    blend({"train": {"blend_epochized": [{"path": "b"}, {"path": "c"}]}}, "inner.yaml")
    with pytest.raises(ConfigError, match=message):
        keys_of(blend({"train": node}))


def test_a_blend_is_told_from_a_recipe(blend, capsys, tmp_path):
    path = blend({"train": {"path": "./a"}})
    assert main(["plan", str(path), "--mode", "plain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 40
    assert main(["index", f"{tmp_path / 'b'}#val", "--workers", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "energon"
    with pytest.raises(ConfigError, match=r"no split 'dev'"):
        keys_of(f"{path}#dev")


def test_a_dataset_in_a_bucket(s3_server, blend, tmp_path):
    path = blend({"train": {"blend": [{"weight": 1, "path": "a"}, {"weight": 1, "path": "b"}]}, "val": {"path": "b"}})
    store = open_store(s3_server.url("energon"), s3_server.options)
    for file in sorted(tmp_path.rglob("*")):
        if file.is_file():
            store.put(file.relative_to(tmp_path).as_posix(), file)
    options = {"store": s3_server.options}
    assert len(keys_of(s3_server.url("energon/a#val"), **options)) == 20
    found = Counter(sample.source for sample in samples_of(s3_server.url(f"energon/{path.name}"), **options))
    assert set(found) == {"data/a", "data/b"}


def test_a_video_is_asked_about(tmp_path, processor):
    clip = make_mp4(num_frames=4, height=56, width=56, fps=2.0)
    config = {
        "sample_type": {"__class__": "VidQASample"},
        "field_map": {"video": "mp4", "context": "json[q]", "answers": "json[a]"},
    }
    tars = {"shard_0.tar": [("1", {"mp4": clip, "json": b'{"q": "What?", "a": ["Noise."]}'})]}
    folder = write_energon(tmp_path / "v", tars, {"train": ["shard_0.tar"]}, config)
    batch = next(iter(StreamLoader(folder, processor=processor, mode="plain")))
    assert batch["pixel_values_videos"].shape[0] > 0


@pytest.mark.parametrize("path", ["http://127.0.0.1:9/x", "s3://bucket/data", "//h/../../x://y", "file://host/x"])
def test_a_blend_sends_nobody_to_another_host_without_the_users_word(blend, path):
    url = str(blend({"train": {"blend": [{"weight": 1, "path": "a"}, {"weight": 1, "path": path}]}}))
    if "://" in path[:8] and not path.startswith("file"):
        with pytest.raises(DatasetError, match=r"so nothing is read there\. .*name it with --tars URL"):
            open_blends(normalise_sources(url), None)
        allowed = open_blends(normalise_sources(url), StoreOptions(tars=(path,)))
        assert allowed[1].url.startswith(path)
    with pytest.raises(VlmStreamError):
        keys_of(url)


@pytest.mark.parametrize("path", ["x::http://127.0.0.1:9/a.tar", "{a,b}", "pipe:id", "a#val", "*", "x.tar", "a\x00b"])
def test_a_blend_names_folders_and_not_patterns(blend, path):
    with pytest.raises(ConfigError, match="not the folder of a dataset or another metadataset"):
        keys_of(blend({"train": {"path": path}}))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("split_parts: [1]", "under 'split_parts' what is no mapping"),
        ("split_parts: {train: 7}", "under 'train' what is no list of names"),
        ("split_parts: {train: {a: b}}", "under 'train' what is no list of names"),
        ("split_parts: {train: [[a.tar]]}", "under 'train' what is no list of names"),
        ("split_parts: {train: ['{0..99999999999}.tar']}", "stands for more names than any dataset has"),
        ("split_parts: {train: ['" + "{0..9}" * 30 + ".tar']}", "stands for more names than any dataset has"),
        ("split_parts: {train: ['{0.tar']}", "a brace without its pair"),
        ("split_parts: {train: [a.tar], exclude: 3}\nexclude: 3", "under 'exclude' what is no list of names"),
        ("split_parts: " + "[" * 5000, "is not YAML"),
        ("split_parts: !!int ''", "is not YAML"),
        ("split_parts: 2001-99-99", "is not YAML"),
        ("split_parts: " + "[" * 100 + "]" * 100, "nested too deep, or holds too much"),
        ("&a split_parts: &b [*b]", "nested too deep, or holds too much"),
        (BOMB, "nested too deep, or holds too much"),
        ('split_parts: {train: ["a\\0.tar"]}', "that is no path"),
        ('split_parts: {train: ["\\ud800.tar"]}', "that is no path"),
        ("split_parts: {train: [../../etc/passwd.tar]}", "is not a path under"),
    ],
)
def test_notes_that_no_tool_has_written_are_refused(dataset, text, sentence):
    (dataset / ".nv-meta/split.yaml").write_text(text)
    with pytest.raises(VlmStreamError, match=sentence):
        keys_of(dataset)


def test_subflavors_that_json_cannot_hold_are_refused(dataset, blend):
    (dataset / ".nv-meta/dataset.yaml").write_text(yaml.safe_dump(CAPTIONS) + "subflavors: {day: 2020-01-01}\n")
    with pytest.raises(DatasetError, match="cannot be written as JSON"):
        keys_of(dataset)
    with pytest.raises(ConfigError, match="are no JSON"):
        keys_of(f"{dataset}#train;subflavors=%7B")


def test_a_blend_that_holds_itself_many_times_ends(blend):
    path = blend({"train": {"blend": [{"weight": 1, "path": "blend.yaml"}] * 10}})
    inner = {"blend": [{"weight": 1, "path": f"{k}.yaml"} for k in (1, 1, 1)]}
    for k in range(1, 15):
        inner = {"blend": [{"weight": 1, "path": f"{k + 1}.yaml" if k < 14 else "a"}] * 3}
        blend({"train": inner}, f"{k}.yaml")
    with pytest.raises(ConfigError, match="one of them holds itself"):
        keys_of(path)
    with pytest.raises(ConfigError, match="more than 1000 metadatasets"):
        keys_of(path.with_name("1.yaml"))
