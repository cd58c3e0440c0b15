"""Without pixels a sample has the same tokens, labels, token types, grids and seconds, and nothing else."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from vlm_stream.convert.sample import measure_media
from vlm_stream.encode import EncodeConfig, Encoder, Steps, call_processor
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.format import is_text_member, load_manifest, read_index, to_conversation
from vlm_stream.media import ImageConfig
from vlm_stream.storage import SpanReader, open_store
from vlm_stream.testing import build_processor, make_jpeg
from vlm_stream.tokens import FrameRule, ImageSize, MediaSizes

FAMILIES = ("glm46v", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")
PIXELS = {"pixel_values", "pixel_values_videos"}
USER = [{"role": "user", "content": [{"type": "text", "text": "So?"}]}]
ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}

# torch's tensors and numpy 2 disagree about keywords inside the GLM processor; it is not about our tensors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning"),
]


@cache
def load(family):
    return build_processor(family)


@pytest.fixture(scope="module")
def samples(toy_shards):
    """Conversation, members and indexed sizes of every toy sample."""
    store = open_store(str(toy_shards))
    manifest = load_manifest(store)
    found = []
    with SpanReader() as reader:
        for shard in manifest.shards:
            index = read_index(store, shard)
            for row, members in enumerate(reader.begin([index.span(row) for row in range(len(index))]).results()):
                texts = {name: bytes(content) for name, content in members.items() if is_text_member(name)}
                found.append((to_conversation(manifest.fields, list(members), texts), members, index.sizes(row)))
    return found


def check_same(encoder, conversation, members, sizes):
    full, thin = encoder.encode(conversation, members), encoder.encode_from_sizes(conversation, sizes)
    assert set(full) - PIXELS == set(thin)
    for key, value in thin.items():
        assert value.dtype == full[key].dtype, key
        assert torch.equal(value, full[key]), key
    return full


@pytest.mark.parametrize("family", FAMILIES)
def test_every_toy_sample_is_encoded_to_the_same_tensors(family, samples):
    encoder = Encoder(load(family), EncodeConfig(inject_fake_image=True))
    seen = [check_same(encoder, *sample) for sample in samples]
    assert any((sample["attention_mask"] == 0).any() for sample in seen)  # a fake image
    assert any("video_grid_thw" in sample and "image_grid_thw" in sample for sample in seen)
    assert any(len(sample.get("image_grid_thw", ())) == 3 for sample in seen)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fps", [None, 3.0])
def test_videos_of_still_images_and_other_frame_rules(family, fps):
    rule = FrameRule(fps=1.0, min_frames=2, max_frames=6)
    encoder = Encoder(load(family), EncodeConfig(frames=rule))
    members = {f"{number}.jpg": make_jpeg(90, 130, number) for number in range(5)}
    rate = {} if fps is None else {"fps": fps}
    for extra in ({}, {"frame_indices": [0, 3, 4]}):
        item = {"type": "video", "video": list(members), **rate, **extra}
        conversation = [{"role": "user", "content": [item]}, ANSWER]
        check_same(encoder, conversation, members, measure_media(conversation, members))


def test_families_that_show_a_part_of_a_chat_and_call_their_processor_themselves():
    def call(processor, texts, loaded, options):
        return call_processor(processor, [text.replace("So?", "Which?") for text in texts], loaded, options)

    encoder = Encoder(load("qwen2_vl"), steps=Steps(shape=lambda conversation: conversation[:2], call=call))
    question = {"role": "user", "content": [{"type": "image", "image": "a.jpg"}, *USER[0]["content"]]}
    members = {"a.jpg": make_jpeg(60, 90, 0)}
    sizes = measure_media([question], members)
    sample = check_same(encoder, [question, ANSWER, *USER, ANSWER], members, sizes)
    text = load("qwen2_vl").tokenizer.decode(sample["input_ids"])
    assert ("So?" in text, text.count("Which?"), text.count("Yes.")) == (False, 1, 1)


def test_text_that_looks_like_tokens_and_cuts(samples):
    conversation = [{"role": "user", "content": [{"type": "text", "text": "Is <|image_pad|> an image?"}]}, ANSWER]
    check_same(Encoder(load("qwen3_vl")), conversation, {}, MediaSizes())
    longest = max(len(Encoder(load("qwen3_vl")).encode_from_sizes(c, s)["input_ids"]) for c, _, s in samples)
    short = Encoder(load("qwen3_vl"), EncodeConfig(max_length=longest - 1))
    for conversation, members, sizes in samples:
        errors = []
        for encode, media in ((short.encode, members), (short.encode_from_sizes, sizes)):
            try:
                encode(conversation, media)
            except BadSampleError as error:
                errors.append((error.stage, error.reason, str(error)))
        assert len(errors) in (0, 2)
        assert len(set(errors)) <= 1


def test_the_processor_itself_still_sees():
    processor = build_processor("qwen2_5_vl")
    encoder = Encoder(processor)
    assert encoder.grid_processor is not processor
    assert "pixel_values" in encoder.encode(
        [{"role": "user", "content": [{"type": "image", "image": "a"}]}, ANSWER], {"a": make_jpeg(60, 60, 0)}
    )


@pytest.mark.parametrize(
    ("content", "sizes", "how"),
    [
        ([{"type": "image", "image": "a"}], MediaSizes(), "more images than the index"),
        ([], MediaSizes(images=(ImageSize(height=56, width=56),)), "fewer images than the index"),
    ],
)
def test_sizes_that_do_not_fit_make_a_bad_sample(content, sizes, how):
    conversation = [{"role": "user", "content": [*content, {"type": "text", "text": "So?"}]}, ANSWER]
    with pytest.raises(BadSampleError, match=f"shows {how} has sizes of"):
        Encoder(load("qwen2_vl")).encode_from_sizes(conversation, sizes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("height", "is_bad"), [(6000, False), (6031, True)])
def test_shapes_that_the_processor_refuses_are_refused_without_it(family, height, is_bad):
    encoder = Encoder(load(family))
    members = {"long.jpg": make_jpeg(height, 30, 0)}
    conversation = [{"role": "user", "content": [{"type": "image", "image": "long.jpg"}]}, ANSWER]
    sizes = measure_media(conversation, members)
    if not is_bad:
        check_same(encoder, conversation, members, sizes)
        return
    with pytest.raises(BadSampleError, match="refused the sample"):
        encoder.encode(conversation, members)
    with pytest.raises(BadSampleError, match=r"its sides .* have a ratio above 200"):
        encoder.encode_from_sizes(conversation, sizes)


def test_media_that_nobody_reads_are_refused_alike():
    conversation = [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}, ANSWER]
    with pytest.raises(BadSampleError, match=r"a\.wav: Qwen2VLProcessor does not read audio"):
        Encoder(load("qwen2_vl")).encode_from_sizes(conversation, MediaSizes())


def test_families_without_grids_are_refused():
    with pytest.raises(ConfigError, match=r"Gemma3Processor cannot be run without pixels.*qwen3_vl"):
        Encoder(load("gemma3")).encode_from_sizes([*USER, ANSWER], MediaSizes())


def test_options_that_change_sizes_are_refused():
    with pytest.raises(ConfigError, match="exif_rotate can change the sizes"):
        _ = Encoder(load("qwen2_vl"), EncodeConfig(image=ImageConfig(exif_rotate=True))).grid_processor
