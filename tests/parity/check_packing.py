"""samplers, neat_packing_vlm."""

import torch
from hypothesis import strategies as st
from nemo_automodel.components.datasets.llm import neat_packing as their_knapsack
from nemo_automodel.components.datasets.vlm import neat_packing_vlm as theirs
from nemo_automodel.components.datasets.vlm import samplers as their_samplers

from tests.parity.compare import fields_of, same
from tests.parity.inputs import encoded, processor_of
from vlm_stream import collate, mapstyle, tokens
from vlm_stream.testing import build_tiny_model

PACKING, SAMPLERS = "vlm.neat_packing_vlm", "vlm.samplers"
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen2_vl")
FPS = (
    "A frame rule that the video processor names without a value (fps=None) is the default; theirs keeps the None and "
    "fails at the first video with 'float * NoneType'."
)
lengths = st.lists(st.integers(0, 30), max_size=25)
sides = st.integers(1, 3000)


@st.composite
def raw_samples(draw):
    """What estimates look at: texts, counts, sizes."""
    items = draw(st.lists(st.sampled_from(["image", "video", "text"]), max_size=4))
    content = [{"type": kind, **({"text": "w" * draw(st.integers(0, 40))} if kind == "text" else {})} for kind in items]
    sample = {"conversation": [{"role": "user", "content": content}, {"role": "assistant", "content": "yes " * 3}]}
    if draw(st.booleans()):
        sample["_text_tokens"] = draw(st.integers(0, 900))
    if draw(st.booleans()):
        sizes = st.tuples(sides, sides).map(list)
        video = st.tuples(st.integers(1, 400), sides, sides, st.floats(0.5, 60), st.floats(0.1, 60)).map(list)
        sample["mm_inputs_meta"] = {
            "images_meta": [draw(st.none() | sizes) for kind in items if kind == "image"],
            "videos_meta": [draw(st.none() | video) for kind in items if kind == "video"],
        }
    return sample


@same(SAMPLERS, "_smart_resize_image", tokens.smart_resize_image, 200)
def resize_image(draw):
    args = draw(sides), draw(sides), draw(st.sampled_from((14, 28, 32)))
    yield "", lambda: tuple(tokens.smart_resize_image(*args)), lambda: their_samplers._smart_resize_image(*args)


@same(SAMPLERS, "_smart_resize_video", tokens.smart_resize_video, 200)
def resize_video(draw):
    args = draw(st.integers(1, 800)), draw(sides), draw(sides)
    yield "", lambda: tuple(tokens.smart_resize_video(*args)), lambda: their_samplers._smart_resize_video(*args)


@same(
    SAMPLERS,
    "LengthGroupedSampler",
    mapstyle.LengthGroupedSampler,
    80,
    why={
        "order.*": "A short last batch stays last: anywhere else it would shift the batches after it. "
        "Whole batches are permuted equally with order='permute'; the default rotates, as its API page promises.",
        "default.*": "The default order rotates the sorted order, as its API page promises; its code permutes batches.",
    },
)
def sampler(draw):
    samples = draw(st.lists(raw_samples(), min_size=1, max_size=12))
    processor = draw(st.sampled_from([None, processor_of("qwen3_vl")]))
    options = {
        "seed": draw(st.integers(0, 99)),
        "processor": processor,
        "max_length": draw(st.none() | st.integers(1, 900)),
        "batch_size": draw(st.integers(1, 4)),
    }
    epoch = draw(st.integers(0, 5))
    ours = mapstyle.LengthGroupedSampler(samples, order="permute", **options)
    default = mapstyle.LengthGroupedSampler(samples, **options)
    other = their_samplers.LengthGroupedSampler(samples, **options)
    for one in (ours, default, other):
        one.set_epoch(epoch)
    for name in ("lengths", "sorted_indices", "batch_size", "epoch"):
        yield name, getattr(ours, name), getattr(other, name)
    for example in samples[:2]:
        yield "_estimate_tokens", ours._estimate_tokens(example), other._estimate_tokens(example)
    yield "len", len(ours), len(other)
    if len(ours) % options["batch_size"] == 0:
        yield "whole", list(ours), list(other)
    yield "order", list(ours), list(other)
    yield "default", list(default), list(other)


@same(
    SAMPLERS,
    "LengthGroupedSampler._extract_image_config",
    "vlm_stream.collate.extract_image_config",
    20,
)
def image_config(draw):
    processor = processor_of(draw(st.sampled_from(FAMILIES)))
    yield "", *(m.LengthGroupedSampler._extract_image_config(processor) for m in (mapstyle, their_samplers))


@same(
    SAMPLERS,
    "LengthGroupedSampler._extract_video_config",
    "vlm_stream.collate.extract_video_config",
    20,
    why={".*": FPS},
)
def video_config(draw):
    processor = processor_of(draw(st.sampled_from(FAMILIES)))
    yield "", *(m.LengthGroupedSampler._extract_video_config(processor) for m in (mapstyle, their_samplers))


KNAPSACK = (
    "Best-fit decreasing, as the API page's 'first-fit decreasing' promises; its code puts samples in the emptiest bin "
    "(worst fit) and needs more packs."
)


def packed_sets(bins):
    return sorted(index for members in bins for index in members)


@same(PACKING, "greedy_knapsack", mapstyle.greedy_knapsack, 150, why={"bins*": KNAPSACK})
def knapsack(draw):
    sizes, capacity = draw(lengths), draw(st.integers(1, 40))
    ours, other = mapstyle.greedy_knapsack(sizes, capacity), their_knapsack.greedy_knapsack(sizes, capacity)
    yield "members", packed_sets(ours), packed_sets(other)
    yield "capacity", all(sum(sizes[i] for i in b) <= capacity for b in ours), True
    yield "no more packs", len(ours) <= len(other), True
    yield "bins", ours, other


@same(PACKING, "greedy_knapsack_vt_balanced", mapstyle.greedy_knapsack_vt_balanced, 100, why={"bins*": KNAPSACK})
def knapsack_balanced(draw):
    sizes, capacity = draw(lengths), draw(st.integers(1, 40))
    seen = [draw(st.integers(0, size)) for size in sizes]
    ours = mapstyle.greedy_knapsack_vt_balanced(sizes, capacity, seen)
    other = theirs.greedy_knapsack_vt_balanced(sizes, capacity, seen)
    loads = [sum(seen[i] for i in members) for members in ours]
    yield "members", packed_sets(ours), packed_sets(other)
    yield "ascending", loads, sorted(loads)
    yield "bins", ours, other


@same(PACKING, "_estimate_image_tokens", collate.estimate_image_tokens, 100)
def image_tokens(draw):
    config = collate.extract_image_config(processor_of("qwen2_5_vl"))
    size = [draw(sides), draw(sides)]
    yield "", lambda: collate.estimate_image_tokens(size, config), lambda: theirs._estimate_image_tokens(size, config)


@same(PACKING, "_estimate_video_tokens", collate.estimate_video_tokens, 100)
def video_tokens(draw):
    config = collate.extract_video_config(processor_of("qwen2_5_vl"))
    meta = [draw(st.integers(0, 400)), draw(sides), draw(sides), draw(st.floats(0, 60)), draw(st.floats(0.1, 60))]
    yield "", lambda: collate.estimate_video_tokens(meta, config), lambda: theirs._estimate_video_tokens(meta, config)


@same(PACKING, "_estimate_sample_length", collate.estimate_sample_length, 100)
def sample_length(draw):
    sample, processor = draw(raw_samples()), processor_of("qwen2_5_vl")
    configs = draw(
        st.sampled_from(
            [(None, None), (collate.extract_image_config(processor), collate.extract_video_config(processor))]
        )
    )
    both = draw(st.booleans())
    yield (
        "",
        lambda: collate.estimate_sample_length(sample, *configs, return_media_tokens=both),
        lambda: theirs._estimate_sample_length(sample, *configs, return_media_tokens=both),
    )


@same(PACKING, "MEDIA_KEYS", "vlm_stream.collate.PACKED_MEDIA_KEYS", 1)
def media_keys(draw):
    yield "", collate.PACKED_MEDIA_KEYS, theirs.MEDIA_KEYS


@same(PACKING, "_shift_sample", collate.shift_sample, 80)
def shift(draw):
    sample = draw(encoded())
    mrope = draw(st.booleans())
    if mrope:
        sample["position_ids"] = torch.arange(len(sample["input_ids"])).expand(3, -1)
    yield "", collate.shift_sample(sample, mrope), theirs._shift_sample(sample, mrope)


def shifted(draw, size=4):
    return [theirs._shift_sample(draw(encoded())) for _ in range(draw(st.integers(1, size)))]


@same(
    PACKING,
    "_build_packed_vlm_sample",
    collate.build_packed_vlm_sample,
    100,
    why={"long.error": "More tokens than pack_size are an error: the row would not fit its batch."},
)
def build_pack(draw):
    samples, alignment = shifted(draw), draw(st.sampled_from((1, 1, 2, 8)))
    yield (
        "",
        lambda: collate.build_packed_vlm_sample(samples, 1000, 7, False, alignment),
        lambda: theirs._build_packed_vlm_sample(samples, 1000, 7, False, alignment),
    )
    yield (
        "long",
        lambda: len(collate.build_packed_vlm_sample(samples, 3, 7)["input_ids"]),
        lambda: len(theirs._build_packed_vlm_sample(samples, 3, 7)["input_ids"]),
    )


@same(PACKING, "_compute_mrope_position_ids", collate.compute_mrope_position_ids, 30)
def mrope(draw):
    processor = processor_of("qwen2_5_vl")
    rule = build_tiny_model("qwen2_5_vl", processor).model.get_rope_index
    ids = processor.tokenizer("a ship and two cats " * draw(st.integers(1, 4)), return_tensors="pt")["input_ids"][0]
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if draw(st.booleans()):
        token, grid = processor.image_token_id, [1, *[2 * draw(st.integers(1, 3)) for _ in "hw"]]
        at = draw(st.integers(0, len(ids)))
        fill = torch.full((grid[1] * grid[2] // 4,), token)
        sample["input_ids"] = torch.cat([ids[:at], fill, ids[at:]])
        sample["attention_mask"] = torch.ones_like(sample["input_ids"])
        sample["image_grid_thw"] = torch.tensor([grid])
    yield (
        "",
        lambda: collate.compute_mrope_position_ids(sample, rule),
        lambda: theirs._compute_mrope_position_ids(sample, rule),
    )


@same(
    PACKING,
    "PackedDatasetWrapper",
    mapstyle.PackedDatasetWrapper,
    60,
    why={
        "signature.*": "get_rope_index and max_retries keep the places that the API page gives them; 0.7.0 has put "
        "sequence_alignment before them.",
        "overflow*": "A pack of which no sample fits gets another one: an empty row would not stack.",
    },
)
def packed_dataset(draw):
    inner = [draw(encoded()) for _ in range(draw(st.integers(1, 5)))]
    order = draw(st.permutations(range(len(inner))))
    cut = draw(st.integers(1, len(inner)))
    bins = [list(order[:cut]), *([list(order[cut:])] if order[cut:] else [])]
    alignment = draw(st.sampled_from((1, 4)))
    for tag, size in (("", draw(st.integers(16, 60))), ("overflow", 3)):
        options = {"padding_idx": 5, "sequence_alignment": alignment, "max_retries": 2}
        ours = mapstyle.PackedDatasetWrapper(inner, bins, size, **options)
        other = theirs.PackedDatasetWrapper(inner, bins, size, **options)
        yield f"{tag} len", len(ours), len(other)
        for k in range(len(bins)):
            yield tag, lambda k=k, ours=ours: ours[k], lambda k=k, other=other: other[k]


@same(PACKING, "PackedDatasetWrapperConfig", mapstyle.PackedDatasetWrapperConfig, 30)
def packed_config(draw):
    options = draw(st.fixed_dictionaries({}, optional={"pack_size": st.integers(20, 90), "max_retries": st.just(3)}))
    ours, other = mapstyle.PackedDatasetWrapperConfig(**options), theirs.PackedDatasetWrapperConfig(**options)
    yield "fields", fields_of(ours), fields_of(other)
    inner = [draw(encoded()) for _ in range(3)]
    made = [c.build(inner_dataset=inner, bins=[[0, 1], [2]], padding_idx=4) for c in (ours, other)]
    for k in range(2):
        yield "", made[0][k], made[1][k]


@same(
    PACKING,
    "neat_pack_dataset_vlm",
    mapstyle.neat_pack_dataset_vlm,
    80,
    why={
        "bins*": KNAPSACK,
        "max_packs*": "max_packs keeps packs of every visual load; theirs keeps those with the least vision.",
    },
)
def pack_dataset(draw):
    raw = draw(st.lists(raw_samples(), min_size=1, max_size=10))
    inner = [draw(encoded(media=False)) for _ in raw]
    options = {
        "ds_raw": draw(st.sampled_from([raw, None])),
        "drop_long_samples": draw(st.booleans()),
        "packing_ratio": draw(st.sampled_from((1.0, 0.9))),
        "balance_media_tokens": draw(st.booleans()),
        "processor": processor_of("qwen3_vl"),
        "sequence_alignment": draw(st.sampled_from((1, 4))),
    }
    size = draw(st.sampled_from([60, 600, 3000]))
    ours, other = (m.neat_pack_dataset_vlm(inner, size, **options) for m in (mapstyle, theirs))
    yield "members", packed_sets(ours.bins), packed_sets(other.bins)
    yield "no more packs", len(ours) <= len(other), True
    yield "bins", ours.bins, other.bins
    few = [m.neat_pack_dataset_vlm(inner, size, max_packs=1, **options).bins for m in (mapstyle, theirs)]
    yield "max_packs", len(few[0]), len(few[1])
    if ours.bins == other.bins:
        yield "max_packs", few[0], few[1]


@same(
    PACKING,
    "NeatPackConfig",
    mapstyle.NeatPackConfig,
    60,
    why={
        "mrope.error": "Positions on several axes go together with aligned documents; theirs has not implemented it.",
    },
)
def neat_config(draw):
    options = draw(
        st.fixed_dictionaries(
            {"pack_size": st.sampled_from((64, 256))},
            optional={
                "packing_format": st.sampled_from(("neat", "thd", "other")),
                "collate_max_length": st.sampled_from((64, 66)),
                "drop_long_samples": st.booleans(),
            },
        )
    )
    cp_size = draw(st.integers(0, 4))
    inner = [draw(encoded(media=False)) for _ in range(5)]

    def built(module, rule=None):
        config = module.NeatPackConfig(**options)
        return config.build(dataset=inner, padding_idx=3, cp_size=cp_size, get_rope_index=rule)

    yield (
        "alignment",
        lambda: built(mapstyle).sequence_alignment,
        lambda: built(theirs).sequence_alignment,
    )
    yield (
        "fields",
        lambda: fields_of(mapstyle.NeatPackConfig(**options)),
        lambda: fields_of(theirs.NeatPackConfig(**options)),
    )
    yield "members", lambda: packed_sets(built(mapstyle).bins), lambda: packed_sets(built(theirs).bins)
    options, cp_size, rule = {"packing_format": "thd"}, 2, lambda input_ids: None
    yield "mrope", lambda: built(mapstyle, rule).sequence_alignment, lambda: built(theirs, rule).sequence_alignment
