"""vlm.loader, vlm.dspark_collate, vlm.utils, datum, audio."""

import io
import json
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import soundfile
import torch
from hypothesis import strategies as st
from nemo_automodel.components.datasets import datum as their_datum
from nemo_automodel.components.datasets.audio import collate_fns as their_collates
from nemo_automodel.components.datasets.audio import datasets as their_audio
from nemo_automodel.components.datasets.audio import multi_en as their_mix
from nemo_automodel.components.datasets.vlm import datasets as their_datasets
from nemo_automodel.components.datasets.vlm import dspark_collate, neat_packing_vlm, utils
from nemo_automodel.components.datasets.vlm import loader as their_loader
from transformers import Qwen2_5OmniProcessor

from tests.parity.compare import Raised, fields_of, missing, outcome, same
from tests.parity.inputs import batches, image_counts, processor_of, text_item, texts, turn, waves
from vlm_stream import mapstyle, sources
from vlm_stream.testing import make_toy_image

LOADER, DRAFT, UTILS = "vlm.loader", "vlm.dspark_collate", "vlm.utils"
DATUM, AUDIO, MIX, ASR = "datum", "audio.datasets", "audio.multi_en", "audio.collate_fns"
dspark_collate.HAVE_QWEN_VL_UTILS = True  # asked for and never used


# loader --------------------------------------------------------------------------------------------------------------


@cache
def model_folder():
    folder = tempfile.mkdtemp(prefix="parity-")
    processor_of("qwen2_5_vl").save_pretrained(folder)
    return folder


def loaded(module, configs, data, chat_template, stage, options, build):
    """Batches of one rank; `configs` is where wrapper and packing configs are."""
    config = module.VlmDataloaderConfig(
        SimpleNamespace(build=lambda: data),
        pretokenization=configs[0].PreTokenizedDatasetWrapperConfig() if stage != "raw" else None,
        packing=configs[1].NeatPackConfig(**options) if stage == "packed" else None,
        chat_template=chat_template,
        shuffle=build.pop("shuffle", False),
    )
    made = config.build(pretrained_model_name_or_path=model_folder(), dp_rank=0, dp_world_size=1, batch_size=2, **build)
    return [dict(batch) for batch in made.dataloader], made.processor.chat_template


@same(
    LOADER,
    "VlmDataloaderConfig VlmDataloaderBuild",
    mapstyle.VlmDataloaderConfig,
    24,
    why={
        "fake*": "The tokens of a fake image are a document of their own in a pack, so that nothing sees them; theirs "
        "become visible.",
        "shuffled*": "With shuffle, packs of similar visual load stay in one step (BalancedPackSampler); theirs undoes "
        "the balance that it has made.",
    },
)
def vlm_loader(draw):
    data = draw(batches(4, max_images=1, max_turns=1))
    template = processor_of("qwen2_5_vl").chat_template + draw(st.sampled_from(["", "{{ 'end' }}"]))
    template = draw(st.sampled_from([None, template]))
    stage = draw(st.sampled_from(["raw", "encoded", "packed", "packed"]))
    options = {"pack_size": 5000, "packing_format": draw(st.sampled_from(["neat", "thd"]))}
    build = {"cp_size": draw(st.sampled_from([1, 1, 2])), "pp_n_microbatches": draw(st.sampled_from([None, 1]))}
    ours = outcome(lambda: loaded(mapstyle, (mapstyle, mapstyle), data, template, stage, options, dict(build)))
    other = outcome(
        lambda: loaded(their_loader, (their_datasets, neat_packing_vlm), data, template, stage, options, dict(build))
    )
    for batch in [] if isinstance(ours, Raised) else ours[0]:
        batch.get("_vlm_pp_media_chunks", {}).pop("image_grid_thw", None)  # see prepare_vlm_media_for_pp
    yield "fake" if stage == "packed" and not all(image_counts(data)) else "", ours, other
    if stage == "packed" and len(data) > 2:
        small = options | {"pack_size": 150}
        build["shuffle"] = True
        pair = [
            outcome(lambda a=a: loaded(*a, data, None, stage, small, dict(build)))
            for a in ((mapstyle, (mapstyle, mapstyle)), (their_loader, (their_datasets, neat_packing_vlm)))
        ]
        yield "shuffled", *pair


@same(
    LOADER,
    "chat_template",
    mapstyle.read_chat_template,
    20,
    why={
        "name.error": "What is neither a template nor a file is an error; theirs renders every chat as these words.",
        "json.error": "JSON without chat_template is an error; theirs renders every chat as the JSON text.",
    },
)
def chat_templates(draw):
    text = draw(st.sampled_from(["{{ messages }}", "{% if a %}", "{{ 1 }}\n"]))
    with tempfile.TemporaryDirectory() as folder:
        plain, wrapped, other = Path(folder, "t.jinja"), Path(folder, "t.json"), Path(folder, "o.json")
        plain.write_text(text)
        wrapped.write_text(json.dumps({"chat_template": text}))
        other.write_text(json.dumps({"a": 1}))
        for tag, given in (("", text), ("", str(plain)), ("", str(wrapped)), ("name", "qwen"), ("json", str(other))):
            pair = [
                lambda f=f, g=given: f(g) for f in (mapstyle.read_chat_template, their_loader._resolve_chat_template)
            ]
            yield tag, *pair


@same(
    LOADER,
    "VlmProcessorConfig VlmVideoProcessorConfig",
    mapstyle.VlmProcessorConfig,
    6,
    why={
        "none.error": "A model without a processor is an error unless a collator is given; theirs has None and fails "
        "at the first batch.",
    },
)
def processors(draw):
    made = lambda **options: tuple(sorted(options.items()))  # noqa: E731
    kwargs = draw(st.sampled_from([{}, {"a": 1}, {"pretrained_model_name_or_path": "other"}]))

    def built(module):
        video = module.VlmVideoProcessorConfig(made, kwargs)
        config = module.VlmProcessorConfig(made, {"b": 2}, draw_video and video)
        return config.build(pretrained_model_name_or_path="name"), video.build(pretrained_model_name_or_path="name")

    draw_video = draw(st.booleans()) or None
    yield "", lambda: built(mapstyle), lambda: built(their_loader)
    folder = model_folder()
    yield (
        "auto",
        *(
            type(m.VlmProcessorConfig().build(pretrained_model_name_or_path=folder)).__name__
            for m in (mapstyle, their_loader)
        ),
    )
    yield (
        "none",
        *(
            lambda m=m: m.VlmProcessorConfig().build(pretrained_model_name_or_path="/nowhere")
            for m in (mapstyle, their_loader)
        ),
    )


@same(LOADER, "VlmCollatorConfig", mapstyle.VlmCollatorConfig, 3)
def collators(draw):
    factory = lambda examples, processor, **options: (examples, processor, options)  # noqa: E731
    kwargs = draw(st.sampled_from([{}, {"max_length": 3}]))
    yield "", *(m.VlmCollatorConfig(factory, kwargs).build(processor="p")([1]) for m in (mapstyle, their_loader))


@same(
    LOADER,
    "RankedVlmDatasetConfig",
    mapstyle.RankedVlmDatasetConfig,
    2,
    why={
        "shares*": "A rank that holds a share of its own visits all of it; theirs deals the share out again.",
    },
)
def ranked(draw):
    data = [{"conversation": [turn("user", text_item("u")), turn("assistant", text_item(str(n)))]} for n in range(6)]
    shard = draw(st.booleans())
    config = SimpleNamespace(
        builds_with_data_parallel_rank=True,
        shard_data=shard,
        build=lambda rank, world_size: data[rank::world_size] if shard else data,
    )

    def seen(module):
        collator = module.VlmCollatorConfig(lambda examples, processor: examples)
        made = module.VlmDataloaderConfig(config, collator=collator, shuffle=False).build(
            pretrained_model_name_or_path=model_folder(), dp_rank=1, dp_world_size=2, batch_size=1
        )
        return [example["conversation"][1]["content"][0]["text"] for batch in made.dataloader for example in batch]

    yield "shares" if shard else "", lambda: seen(mapstyle), lambda: seen(their_loader)


# drafts, pixel bounds ------------------------------------------------------------------------------------------------


@same(DRAFT, "dspark_vlm_collate_fn", mapstyle.dspark_vlm_collate_fn, 30)
def draft(draw):
    processor = processor_of(draw(st.sampled_from(["qwen2_5_vl", "qwen3_vl"])))
    args = draw(batches(max_images=1)), processor, draw(st.sampled_from([160, 400])), draw(st.booleans())
    yield (
        "",
        lambda: dict(mapstyle.dspark_vlm_collate_fn(*args)),
        lambda: dict(dspark_collate.dspark_vlm_collate_fn(*args)),
    )


@same(DRAFT, "build_dspark_vlm_dataloader", mapstyle.build_dspark_vlm_dataloader, 5)
def draft_loader(draw):
    data = draw(batches(3, max_images=1))
    options = {
        "dataset_cfg": SimpleNamespace(instantiate=lambda: data),
        "processor": processor_of("qwen2_5_vl"),
        "batch_size": 2,
        "max_length": 300,
        "shuffle": False,
        "distributed": draw(st.booleans()),
        "dp_mesh": SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 1),
    }
    yield "", *([dict(b) for b in m.build_dspark_vlm_dataloader(**options)] for m in (mapstyle, dspark_collate))


@same(
    UTILS,
    "set_image_pixel_bounds",
    mapstyle.set_image_pixel_bounds,
    12,
    why={
        "size.*": "The bounds are set in `size`, where image processors of transformers 5 have them; theirs sets "
        "attributes, which still work there and are deprecated.",
    },
)
def pixel_bounds(draw):
    bounds = draw(st.fixed_dictionaries({}, optional={"max_pixels": st.just(3136), "min_pixels": st.just(784)}))

    def bounded(module):
        images = SimpleNamespace(size={"max_pixels": 1, "min_pixels": 2}, max_pixels=1, min_pixels=2)
        module.set_image_pixel_bounds(SimpleNamespace(image_processor=images), **bounds)
        module.set_image_pixel_bounds(SimpleNamespace(), **bounds)
        return vars(images)

    def shrunk(module):
        processor = processor_of.__wrapped__("qwen2_5_vl")
        module.set_image_pixel_bounds(processor, **bounds)
        return dict(processor.image_processor.size)

    def seen(module):
        processor = processor_of.__wrapped__("qwen2_5_vl")
        module.set_image_pixel_bounds(processor, **bounds)
        return processor.image_processor(images=[make_toy_image(140, 140)], return_tensors="pt")["image_grid_thw"]

    yield "effect", seen(mapstyle), seen(utils)
    yield "", bounded(mapstyle), bounded(utils)
    yield "size", shrunk(mapstyle), shrunk(utils)


# datum ---------------------------------------------------------------------------------------------------------------


@st.composite
def datums(draw, odd=False):
    out = []
    for _ in range(draw(st.integers(0 if odd else 1, 3))):
        length = draw(st.integers(1, 6))
        numbers = st.lists(st.integers(0, 3), min_size=length, max_size=length)
        out.append(
            ({"input_ids": draw(numbers)}, {"weights": draw(numbers), "logprobs": [float(n) for n in draw(numbers)]})
        )
        out[-1][1]["target_tokens"] = draw(numbers)
        out[-1][1]["advantages"] = [0.5]
    return out


PARTIAL = "A field with neither one number per token nor one per sequence is an error; theirs keeps its first number."


@same(DATUM, "Datum", mapstyle.Datum, 60, why={"partial.error": PARTIAL})
def one_datum(draw):
    for ids, extra in draw(datums())[:1]:
        pair = [m.Datum(ids["input_ids"], dict(extra)) for m in (mapstyle, their_datum)]
        yield "", *(one.to_features() for one in pair)
        yield "fields", *map(fields_of, pair)
        yield "length", *(one.seq_len for one in pair)
        yield "two", *(lambda m=m: m.Datum([[1, 2]]) for m in (mapstyle, their_datum))
    wrong = {"weights": [1.0, 2.0]}
    yield "partial", *(lambda m=m: m.collate_datums([m.Datum([1, 2, 3], dict(wrong))]) for m in (mapstyle, their_datum))


@same(
    DATUM,
    "collate_datums",
    mapstyle.collate_datums,
    100,
    why={
        "ignored.labels.values": "Padding gets the ignore_index that was asked for; theirs always -100.",
    },
)
def datum_batches(draw):
    rows = draw(datums(odd=True))
    if draw(st.booleans()):
        for _, extra in rows[:1] if draw(st.integers(0, 5)) == 0 else rows:
            extra.pop("target_tokens")
    options = {"packed": draw(st.booleans()), "pad_seq_len_divisible": draw(st.sampled_from([None, 4]))}
    index = draw(st.sampled_from([-100, -1]))

    def collated(module):
        made = [module.Datum(ids["input_ids"], dict(extra)) for ids, extra in rows]
        return module.collate_datums(made, ignore_index=index, **options)

    yield "" if index == -100 else "ignored", lambda: collated(mapstyle), lambda: collated(their_datum)


# audio ---------------------------------------------------------------------------------------------------------------


def wav(seconds, rate=16_000, channels=1):
    held = io.BytesIO()
    wave = np.sin(np.arange(int(seconds * rate)) / 9).astype(np.float32) / 2
    soundfile.write(held, np.stack([wave] * channels, axis=1), rate, format="WAV", subtype="FLOAT")
    return {"bytes": held.getvalue(), "path": None}


@cache
def speech(rate=16_000, text="text"):
    folder = tempfile.mkdtemp(prefix="parity-")
    clips = [wav(s, rate, 1 + n % 2) for n, s in enumerate((0.2, 0.5, 1.5, 2.0, 0.9))]
    said = ["Hello, <COMMA> world!", "  ", "don\u2019t_stop 42", "<MUSIC>", "the end."]
    rows = datasets.Dataset.from_dict({"audio": clips, text: said, "speaker": list(range(5))})
    rows.cast_column("audio", datasets.Audio()).to_parquet(f"{folder}/train.parquet")
    return folder


def heard(rows):
    return [rows[i] for i in range(len(rows))]


RESAMPLED = "Clips of another rate are resampled by soxr, ours everywhere; theirs by scipy's resample_poly."


@same(AUDIO, "make_hf_audio_asr_dataset", mapstyle.make_hf_audio_asr_dataset, 16, why={"rate*": RESAMPLED})
def asr(draw):
    options = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "system_prompt": st.sampled_from(["Be brief.", " "]),
                "user_prompt": st.just("Write."),
                "min_audio_duration_seconds": st.just(0.5),
                "max_audio_duration_seconds": st.just(1.5),
                "drop_empty_text": st.booleans(),
                "text_column": st.just("none"),
            },
        )
    )
    yield "", *(lambda m=m: heard(m.make_hf_audio_asr_dataset(speech(), **options)) for m in (mapstyle, their_audio))
    yield "rate", *(heard(m.make_hf_audio_asr_dataset(speech(8000))) for m in (mapstyle, their_audio))


@same(AUDIO, "make_cv17_dataset Cv17DatasetConfig", sources.make_cv17_dataset, 4)
def cv17(draw):
    folder, options = speech(), {"text_column": "text", "sampling_rate": 16_000}
    yield "", *(heard(m.make_cv17_dataset(folder, **options)) for m in (sources, their_audio))
    yield "config", *(heard(m.Cv17DatasetConfig(folder, **options).build()) for m in (mapstyle, their_audio))
    yield "fields", *(fields_of(m.Cv17DatasetConfig()) for m in (mapstyle, their_audio))


@same(MIX, "normalize_text", mapstyle.normalize_text, 100)
def normalized(draw):
    text = draw(st.none() | st.text() | texts | st.sampled_from(["a<B>_c\u2019d", "x\x1cy"]))
    yield "", mapstyle.normalize_text(text), their_mix.normalize_text(text)


NO_CODE = "No corpus of the usual mix runs code that it brings along; who wants that says so in a `Source`."


@same(MIX, "Source SOURCES", mapstyle.Source, 1, why={"*.trust_remote_code": NO_CODE})
def corpora(draw):
    yield "", [fields_of(one) for one in mapstyle.SOURCES], [fields_of(one) for one in their_mix.SOURCES]


OTHER_WORDS = "The default instruction says the same in other words."


@same(MIX, "DEFAULT_USER_PROMPT", "vlm_stream.mapstyle.DEFAULT_USER_PROMPT", 1, why={"": OTHER_WORDS})
def prompt(draw):
    yield "", mapstyle.DEFAULT_USER_PROMPT, their_mix.DEFAULT_USER_PROMPT


@same(MIX, "TARGET_SAMPLING_RATE", "vlm_stream.mapstyle.TARGET_SAMPLING_RATE", 1)
def rate(draw):
    yield "", mapstyle.TARGET_SAMPLING_RATE, their_mix.TARGET_SAMPLING_RATE


def specs(module):
    return [
        module.Source("a", speech(), None, "train", "text"),
        {
            "name": "b",
            "repo": speech(16_000, "said"),
            "config": None,
            "split": "train",
            "text_col": "said",
            "limit": 3,
        },
    ]


def mix_options(draw):
    return draw(
        st.fixed_dictionaries(
            {"shuffle_seed": st.none() | st.integers(0, 9)},
            optional={"min_audio_duration_seconds": st.none(), "max_audio_duration_seconds": st.just(1.6)},
        )
    )


@same(MIX, "build_multi_en_source_mix", mapstyle.build_multi_en_source_mix, 6)
def mix(draw):
    options = mix_options(draw)
    yield "", *(heard(m.build_multi_en_source_mix(sources=specs(m), **options)) for m in (mapstyle, their_mix))
    yield "unknown", *(lambda m=m: m.build_multi_en_source_mix(sources=[{"x": 1}]) for m in (mapstyle, their_mix))


@same(
    MIX,
    "make_multi_en_asr_dataset",
    mapstyle.make_multi_en_asr_dataset,
    4,
    why={
        "signature.user_prompt": OTHER_WORDS,
        "default.*": OTHER_WORDS,
    },
)
def mixed_asr(draw):
    options = mix_options(draw)
    pair = [
        heard(m.make_multi_en_asr_dataset(sources=specs(m), user_prompt="Write.", **options))
        for m in (mapstyle, their_mix)
    ]
    yield "", *pair
    yield "default", *(heard(m.make_multi_en_asr_dataset(sources=specs(m), **options)) for m in (mapstyle, their_mix))


@cache
def omni25():
    parts = processor_of.__wrapped__("qwen3_omni_moe")
    return Qwen2_5OmniProcessor(
        parts.image_processor, parts.video_processor, parts.feature_extractor, parts.tokenizer, parts.chat_template
    )


def asr_checks(name, processor):
    @same(ASR, name, getattr(mapstyle, name), 15)
    def collated(draw):
        examples = []
        for _ in range(draw(st.integers(1, 2))):
            wave = waves(draw(st.sampled_from([0.5, 1.0])))
            wave = draw(st.sampled_from([wave, torch.tensor(wave), wave.astype(np.float64), wave[None], "path"]))
            answer = draw(st.sampled_from(["the end", "yes it is", "", "  "]))
            user = {"role": "user", "content": [text_item("Write."), {"type": "audio", "audio": wave}]}
            examples.append({"conversation": [user, turn("assistant", text_item(answer))]})
        pair = [lambda m=m: dict(getattr(m, name)(examples, processor())) for m in (mapstyle, their_collates)]
        yield "", *pair


asr_checks("qwen3_omni_asr_collate_fn", lambda: processor_of("qwen3_omni_moe"))
asr_checks("qwen2_5_omni_asr_collate_fn", omni25)
missing(
    UTILS,
    "process_text_batch",
    "One call of the processor, with pixels in bfloat16; nothing of NeMo Automodel calls it.",
)
