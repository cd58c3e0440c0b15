"""vlm.datasets: sharegpt and meta files, HF datasets, wrappers, configs; vlm.mock."""

import copy
import io
import json
import tempfile
from functools import cache
from pathlib import Path

import datasets
from hypothesis import strategies as st
from nemo_automodel.components.datasets.vlm import datasets as theirs
from nemo_automodel.components.datasets.vlm import mock as their_mock

from tests.parity.compare import fields_of, missing, same
from tests.parity.inputs import batches, processor_of, texts
from vlm_stream import mapstyle, sources
from vlm_stream.testing import make_toy_image

DATA, MOCK = "vlm.datasets", "vlm.mock"
MISMATCH = (
    "Placeholders and media that do not match, and roles that nothing maps, are bad records, counted and named; theirs "
    "lose them in silence."
)
SHARES = (
    "One rule deals records to ranks for every format and ratio, only with shard_data; every record is in one share. "
    "Theirs cuts shares to equal length and shards JSONL with a ratio unasked."
)


@st.composite
def sharegpt(draw, fitting=True):
    """An example whose placeholders fit its media, or one that may not."""
    messages, shown = [], {"<image>": 0, "<video>": 0}
    for number in range(draw(st.integers(1, 4))):
        role = "user" if number % 2 == 0 else "assistant"
        parts = draw(
            st.lists(st.sampled_from(["<image>", "<IMAGE>", "<video>", "words", " and "]), min_size=1, max_size=4)
        )
        text = "".join(parts) if role == "user" else "answer"
        for mark in shown:
            shown[mark] += text.lower().count(mark)
        messages.append({"role": role, "content": text})
    if not fitting:
        shown = {mark: max(0, n + draw(st.integers(-1, 1))) for mark, n in shown.items()}
        messages.append({"role": draw(st.sampled_from(["tool", "user"])), "content": "x"})
    example = {"messages": messages}
    for column, mark in (("images", "<image>"), ("videos", "<video>")):
        if shown[mark] or draw(st.booleans()):
            example[column] = [draw(st.sampled_from(["a.jpg", "/b/c.jpg", "d e.png"])) for _ in range(shown[mark])]
    if draw(st.booleans()):
        example["_text_tokens"] = draw(st.integers(0, 50))
    return example


@same(DATA, "convert_sharegpt_to_conversation", sources.convert_sharegpt_to_conversation, 120, why={"other*": MISMATCH})
def convert(draw):
    media_dir = draw(st.sampled_from([None, "/media"]))
    for tag, fitting in (("", True), ("other", False)):
        example = draw(sharegpt(fitting))
        pair = [
            lambda m=m, e=example: m.convert_sharegpt_to_conversation(copy.deepcopy(e), media_dir=media_dir)
            for m in (sources, theirs)
        ]
        yield tag, *pair


def written(folder, examples, suffix):
    path = Path(folder, f"data.{suffix}")
    lines = [json.dumps(example) for example in examples]
    path.write_text("\n".join(lines) + "\n" if suffix == "jsonl" else "[" + ",".join(lines) + "]")
    return path


@same(DATA, "_load_json_or_jsonl", sources.load_json_or_jsonl, 20)
def load_json(draw):
    with tempfile.TemporaryDirectory() as folder:
        path = str(written(folder, draw(st.lists(sharegpt(), max_size=4)), draw(st.sampled_from(["json", "jsonl"]))))
        yield "", lambda: list(sources.load_json_or_jsonl(path)), lambda: theirs._load_json_or_jsonl(path)


@same(DATA, "_load_jsonl_for_rank", sources.load_jsonl_for_rank, 60, why={"shares*": SHARES})
def load_for_rank(draw):
    with tempfile.TemporaryDirectory() as folder:
        path = str(written(folder, [{"n": n} for n in range(draw(st.integers(1, 12)))], "jsonl"))
        ratio = draw(st.sampled_from([1.0, 0.5, 1.5, 2.0, 0.3]))
        whole = [sources.load_jsonl_for_rank(path, ratio, 0, 1), theirs._load_jsonl_for_rank(path, ratio, 0, 1)]
        yield "", *(tuple(map(list_or_int, one)) for one in whole)
        world = draw(st.integers(2, 3))
        yield (
            "shares",
            *(
                list_or_int(f(path, ratio, 1, world)[0])
                for f in (sources.load_jsonl_for_rank, theirs._load_jsonl_for_rank)
            ),
        )


def list_or_int(value):
    return value if isinstance(value, int) else list(value)


@same(DATA, "_collect_sample_stats", sources.collect_sample_stats, 60)
def stats(draw):
    examples = [theirs.convert_sharegpt_to_conversation(draw(sharegpt())) for _ in range(draw(st.integers(0, 4)))]
    for example in examples:
        if draw(st.booleans()):
            meta = st.none() | st.just([10, 20]) | st.just({"n_tokens": 7})
            example["mm_inputs_meta"] = {"images_meta": [draw(meta)], "videos_meta": []}
    yield "", dict(sources.collect_sample_stats(examples)), dict(theirs._collect_sample_stats(examples))


@same(DATA, "make_meta_dataset", sources.make_meta_dataset, 40, why={"shares*": SHARES, "other*": MISMATCH})
def meta(draw):
    yield from meta_pairs(draw, lambda m, path, **o: m.make_meta_dataset(path, **o))


@same(DATA, "MetaDatasetConfig", sources.MetaDatasetConfig, 30, why={"shares*": SHARES, "other*": MISMATCH})
def meta_config(draw):
    def build(module, path, rank=None, world_size=None, **options):
        return module.MetaDatasetConfig(path, **options).build(rank=rank, world_size=world_size)

    yield from meta_pairs(draw, build)


def meta_pairs(draw, load):
    with tempfile.TemporaryDirectory() as folder:
        entries = {}
        for name in draw(st.sets(st.sampled_from("abc"), min_size=1)):
            Path(folder, name).mkdir()
            path = written(
                Path(folder, name),
                draw(st.lists(sharegpt(), min_size=2, max_size=5)),
                draw(st.sampled_from(["json", "jsonl"])),
            )
            entries[name] = {
                "file_name": str(path),
                "media_dir": "/m",
                "sample_ratio": draw(st.sampled_from([1.0, 0.5, 2.0])),
            }
        path = str(Path(folder, "meta.json"))
        Path(path).write_text(json.dumps(entries))
        names = draw(st.none() | st.just(["a"]) | st.just(["zz"]))
        made = lambda m, **o: (lambda found: (list(found), found.stats))(load(m, path, dataset_names=names, **o))  # noqa: E731
        yield "", lambda: made(sources), lambda: made(theirs)
        share = {"shard_data": True, "rank": 1, "world_size": 2}
        yield "shares", lambda: made(sources, **share)[0], lambda: made(theirs, **share)[0]
        Path(path).write_text(json.dumps({"a": {"file_name": str(written(folder, [draw(sharegpt(False))], "json"))}}))
        names = None
        yield "other", lambda: made(sources), lambda: made(theirs)


# HF datasets ---------------------------------------------------------------------------------------------------------


def as_list(rows):
    return [rows[i] for i in range(len(rows))]


@cache
def hub_folder(name):
    """A folder of parquet with the columns of a dataset on the hub."""
    shown = [make_toy_image(28 + n, 30, n) for n in range(4)]
    talk = json.dumps([{"from": "human", "value": "see <image> this"}, {"from": "gpt", "value": " yes "}])
    chat = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "it"}]
    parses = [json.dumps({"gt_parse": {"menu": [{"nm": f"x{n}"}], "total": n}}) for n in range(4)]
    columns = {
        "rdr": {"image": shown, "text": ["a", "b", "c", "d"]},
        "cord_v2": {"image": shown, "ground_truth": parses},
        "medpix": {"image_id": shown, "question": ["q1", "q2", "q3", "q4"], "answer": ["a1", "a2", "a3", "a4"]},
        "unimm_chat": {"image": shown, "conversation": [talk] * 4},
        "shopify_product_catalogue": {"product_image": shown, "ground_truth_category": ["w", "x", "y", "z"]},
        "llava_onevision": {"image": shown, "conversations": [chat] * 4},
        "tulu3": {
            "messages": [
                [{"role": "user", "content": f"u{n}"}, {"role": "assistant", "content": "a"}] for n in range(4)
            ]
        },
    }[name]
    folder = tempfile.mkdtemp(prefix="parity-")
    kind = {key: datasets.Image() for key, value in columns.items() if value is shown}
    rows = datasets.Dataset.from_dict({k: [_png(v) for v in c] if c is shown else c for k, c in columns.items()})
    for key, feature in kind.items():
        rows = rows.cast_column(key, feature)
    rows.to_parquet(f"{folder}/train.parquet")
    return folder


def _png(image):
    held = io.BytesIO()
    image.save(held, "PNG")
    return {"bytes": held.getvalue(), "path": None}


def opened(value):
    """Undecoded images as images: theirs leave some to the collate function."""
    from PIL import Image

    if isinstance(value, dict) and set(value) == {"bytes", "path"}:
        return Image.open(io.BytesIO(value["bytes"]))
    if isinstance(value, dict):
        return {key: opened(one) for key, one in value.items()}
    if isinstance(value, list):
        return [opened(one) for one in value]
    return value


NAMED = {"signature.limit_dataset_samples": "Options of datasets are passed by name."}
LIMITED = ("cord_v2", "shopify_product_catalogue")
CONFIGS = {
    "rdr": "RdrDatasetConfig",
    "cord_v2": "CordV2DatasetConfig",
    "medpix": "MedPixDatasetConfig",
    "unimm_chat": "UnimmChatDatasetConfig",
    "shopify_product_catalogue": "ShopifyProductCatalogueDatasetConfig",
    "llava_onevision": "LlavaOnevisionDatasetConfig",
    "tulu3": None,
}


def factory_checks(name, config):
    @same(
        DATA, f"make_{name}_dataset", getattr(sources, f"make_{name}_dataset"), 3, why=NAMED if name in LIMITED else {}
    )
    def factory(draw):
        options = {"limit_dataset_samples": draw(st.integers(1, 3))} if name in LIMITED else {}
        pair = [getattr(m, f"make_{name}_dataset")(hub_folder(name), **options) for m in (sources, theirs)]
        yield "", *(opened(as_list(one)) for one in pair)

    if config is not None:

        @same(DATA, config, getattr(mapstyle, config), 2)
        def configured(draw):
            ours, other = (getattr(m, config) for m in (mapstyle, theirs))
            yield "fields", fields_of(ours()), fields_of(other())
            yield "", *(opened(as_list(one(hub_folder(name)).build())) for one in (ours, other))


for _name, _config in CONFIGS.items():
    factory_checks(_name, _config)


@same(DATA, "Tulu3MagicoderTextMixDatasetConfig", mapstyle.Tulu3MagicoderTextMixDatasetConfig, 1)
def mixture_config(draw):
    yield "", *(fields_of(m.Tulu3MagicoderTextMixDatasetConfig()) for m in (mapstyle, theirs))


@same(
    DATA,
    "make_tulu3_magicoder_text_mix_dataset",
    sources.make_tulu3_magicoder_text_mix_dataset,
    4,
    why={"signature.*": "Takes the two datasets first; everything else is passed by name."},
)
def mixture(draw):
    tulu = as_list(datasets.load_dataset(hub_folder("tulu3"), split="train"))
    code = [{"problem": f"p{n}", "solution": f"s{n}"} for n in range(draw(st.integers(1, 4)))]
    options = {"seed": draw(st.integers(0, 9)), "limit_total": draw(st.none() | st.just(3))}
    ours = sources.make_tulu3_magicoder_text_mix_dataset(tulu, code, **options)
    held, theirs.load_dataset = (
        theirs.load_dataset,
        lambda name, **_: datasets.Dataset.from_list(code if "agicoder" in name else tulu),
    )
    try:
        other = theirs.make_tulu3_magicoder_text_mix_dataset(**options)
    finally:
        theirs.load_dataset = held
    yield "", as_list(ours), list(other)


TEXT_TO_SQL = "Text-to-SQL without any medium; convert such rows to `messages` and use make_sharegpt_dataset."
for _sql in ("make_spider_dataset", "spider_schema_to_ddl", "TEXT_TO_SQL_PROMPT"):
    missing(DATA, _sql, TEXT_TO_SQL)


@same(DATA, "SHOPIFY_PRODUCT_CATALOGUE_PROMPT", "vlm_stream.sources.SHOPIFY_PRODUCT_CATALOGUE_PROMPT", 1)
def shopify_prompt(draw):
    yield "", sources.SHOPIFY_PRODUCT_CATALOGUE_PROMPT, theirs.SHOPIFY_PRODUCT_CATALOGUE_PROMPT


@same(
    MOCK,
    "build_mock_vlm_dataset",
    sources.build_mock_vlm_dataset,
    20,
    why={"words*": "Answers are other random words."},
)
def mock(draw):
    options = {"num_samples": draw(st.integers(0, 3)), "image_size": (8, 12), "seed": draw(st.integers(0, 9))}
    options["num_images_per_sample"] = draw(st.integers(0, 2))
    told = {"responses": ["one", "two"], "prompt": draw(texts)}
    yield "", *(m.build_mock_vlm_dataset(**options, **told) for m in (sources, their_mock))
    yield "words", *(m.build_mock_vlm_dataset(**options, max_length=9)[:1] for m in (sources, their_mock))


@same(MOCK, "MockVlmDatasetConfig", mapstyle.MockVlmDatasetConfig, 3)
def mock_config(draw):
    options = {"num_samples": 2, "image_size": (4, 6), "responses": ["x"]}
    ours, other = (m.MockVlmDatasetConfig(**options) for m in (mapstyle, their_mock))
    yield "fields", fields_of(ours), fields_of(other)
    yield "", ours.build(), other.build()


# wrappers ------------------------------------------------------------------------------------------------------------

REPLACED = "Which sample stands in for a bad one depends on its index alone, in any worker."


@same(
    DATA,
    "PreTokenizedDatasetWrapper",
    mapstyle.PreTokenizedDatasetWrapper,
    40,
    why={
        "long*": REPLACED,
        "*.mm_token_type_ids.shape": "Every tensor along the tokens is [S]; theirs leaves this one [1, S].",
    },
)
def pretokenized(draw):
    examples, processor = draw(batches(max_images=1)), processor_of("qwen2_5_vl")
    fake = draw(st.booleans())
    made = [
        m.PreTokenizedDatasetWrapper(copy.deepcopy(examples), processor, inject_fake_images=fake)
        for m in (mapstyle, theirs)
    ]
    yield "len", *map(len, made)
    for index in range(len(examples)):
        yield "", *(one[index] for one in made)
    length = len(made[0][0]["input_ids"]) - 2
    for tag, options in (("long", {"max_length": length}), ("cut", {"max_length": length, "truncate": True})):
        pair = [
            lambda m=m, o=options: m.PreTokenizedDatasetWrapper(copy.deepcopy(examples), processor, max_retries=3, **o)[
                0
            ]
            for m in (mapstyle, theirs)
        ]
        yield tag, *pair


@same(
    DATA,
    "PreTokenizedDatasetWrapperConfig",
    mapstyle.PreTokenizedDatasetWrapperConfig,
    10,
    why={
        "*.mm_token_type_ids.shape": "As for the wrapper.",
    },
)
def pretokenized_config(draw):
    examples, processor = draw(batches(1, max_images=1)), processor_of("qwen2_5_vl")
    options = draw(st.sampled_from([{}, {"max_length": 900, "inject_fake_images": False}]))
    ours, other = (m.PreTokenizedDatasetWrapperConfig(**options) for m in (mapstyle, theirs))
    yield "fields", fields_of(ours), fields_of(other)
    yield "", *(c.build(dataset=copy.deepcopy(examples), processor=processor)[0] for c in (ours, other))


class Broken(list):
    """A list, one of whose entries cannot be had."""

    def __getitem__(self, index):
        if index == 0:
            raise OSError("gone")
        return super().__getitem__(index)


@same(DATA, "RobustDatasetWrapper", mapstyle.RobustDatasetWrapper, 40, why={"replaced*": REPLACED})
def robust(draw):
    examples, processor = draw(batches(max_images=1)), processor_of("qwen2_5_vl")
    preload = draw(st.booleans())

    def wrapped(module, data):
        robust = module.RobustDatasetWrapper(data, max_retries=4)
        robust.preload_media, robust.processor = preload, processor
        return robust

    made = [wrapped(m, copy.deepcopy(examples)) for m in (mapstyle, theirs)]
    for index in range(len(examples)):
        yield "", *(one[index] for one in made)
    broken = [wrapped(m, Broken(copy.deepcopy(examples * 6))) for m in (mapstyle, theirs)]
    yield "replaced", *(lambda one=one: one[0] for one in broken)
    yield "hopeless", *(lambda m=m: wrapped(m, Broken(examples[:1]))[0] for m in (mapstyle, theirs))
