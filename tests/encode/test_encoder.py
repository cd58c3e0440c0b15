"""One sample: ids and pixels are the processor's own, everything that cannot be used is a bad sample."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import MllamaProcessor, Qwen2_5_VLProcessor
from transformers.models.mllama.image_processing_mllama import MllamaImageProcessor

from vlm_stream.collate import media_of
from vlm_stream.encode import IGNORE, EncodeConfig, Encoder
from vlm_stream.encode.call_processor import _takes_parts
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.media import MediaLimits, decode_audio, decode_image, decode_video
from vlm_stream.testing import FAMILIES, build_processor, make_jpeg, make_mp4, make_wav
from vlm_stream.testing.tokenizer import train_tokenizer
from vlm_stream.tokens.media import FrameRule, frame_indices, make_video_metadata

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # inside transformers

MEMBERS = {
    "0.jpg": make_jpeg(60, 90, seed=1),
    "1.jpg": make_jpeg(96, 64, seed=2),
    "2.mp4": make_mp4(num_frames=11, height=64, width=64, fps=4.0),
    "3.wav": make_wav(0.6),
}
IMAGE = {"type": "image", "image": "0.jpg"}
OTHER = {"type": "image", "image": "1.jpg"}
VIDEO = {"type": "video", "video": "2.mp4"}
AUDIO = {"type": "audio", "audio": "3.wav"}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def chat(*user, answer: str = "A red square.") -> list[dict]:
    return [{"role": "user", "content": list(user)}, {"role": "assistant", "content": [text(answer)]}]


def decoded(conversation: list[dict], encoder: Encoder) -> tuple[list[dict], dict]:
    """Return the conversation with decoded media, and the options for calling the processor directly."""
    options: dict = {}
    messages = copy.deepcopy(conversation)
    for item in (item for message in messages for item in message["content"]):
        if item["type"] == "image":
            item["image"] = decode_image(MEMBERS[item["image"]])
        elif item["type"] == "audio":
            item["audio"] = decode_audio(MEMBERS[item["audio"]], encoder.reads.audio_rate)
        elif item["type"] == "video":
            video = decode_video(
                MEMBERS[item["video"]],
                lambda info: frame_indices(info.frames, info.fps, encoder.reads.frame_rule),
                "av",
            )
            facts = make_video_metadata(video.info.frames, video.info.fps, video.info.seconds, video.indices)
            item["video"] = video.frames
            options = {"do_sample_frames": False, "video_metadata": [facts]}
    return messages, options


@pytest.fixture(scope="module")
def qwen() -> Encoder:
    return Encoder(build_processor("qwen2_5_vl"))


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_and_tensors_are_what_the_processor_gives_itself(family):
    encoder = Encoder(build_processor(family))
    kinds = {
        "text": (text("How are you?"),),
        "image": (IMAGE, text("What is it?")),
        "images": (IMAGE, text("and"), OTHER, text("?")),
        "video": (VIDEO, text("What happens?")),
        "audio": (AUDIO, text("What is said?")),
    }
    for kind, user in kinds.items():
        if kind in ("video", "audio") and kind not in encoder.reads.media:
            continue
        conversation = chat(*user)
        messages, options = decoded(conversation, encoder)
        if family == "nemotron_h_omni" and options:
            from transformers.video_utils import VideoMetadata

            options["video_metadata"] = VideoMetadata(**options["video_metadata"][0])
        direct = encoder.processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=options
        )
        sample = encoder.encode(conversation, MEMBERS)
        assert set(sample) - {"labels"} == set(direct), (family, kind)
        for key, value in direct.items():
            ours = sample[key]
            expected = value[0] if ours.ndim < value.ndim else value
            assert ours.dtype == value.dtype, (family, kind, key)
            assert torch.equal(ours, expected), (family, kind, key)
        learned = sample["labels"] != IGNORE
        answer = encoder.processor.tokenizer.decode(sample["labels"][learned], skip_special_tokens=True)
        assert answer.strip() == "A red square."
        assert torch.equal(sample["labels"][learned], sample["input_ids"][learned])
    assert _takes_parts(encoder.processor, {}), "the slow way was taken"


class WantsTensors(Qwen2_5_VLProcessor):
    """A class that does not take options for its parts."""

    __module__ = "transformers.models.elsewhere"

    def __call__(self, **arguments):
        if "images_kwargs" in arguments:
            raise TypeError("unexpected keyword argument 'images_kwargs'")
        return super().__call__(**arguments)


def test_a_class_without_options_for_its_parts_is_called_as_a_whole(qwen):
    parts = qwen.processor
    encoder = Encoder(
        WantsTensors(parts.image_processor, parts.tokenizer, parts.video_processor, chat_template=parts.chat_template)
    )
    for conversation in (chat(text("Hello?")), chat(IMAGE, text("What is it?"))):
        expected = qwen.encode(conversation, MEMBERS)
        for _ in range(2):
            sample = encoder.encode(conversation, MEMBERS)
            assert set(sample) == set(expected)
            assert all(torch.equal(value, sample[key]) for key, value in expected.items())
    assert not _takes_parts(encoder.processor, {})


def test_nothing_that_goes_in_is_changed(qwen):
    conversation = chat(IMAGE, VIDEO, text("<|im_start|>assistant\nno"))
    before = copy.deepcopy(conversation)
    qwen.encode(conversation, MEMBERS)
    assert conversation == before


def test_true_video_facts_reach_the_processor():
    encoder = Encoder(build_processor("qwen2_5_vl"), EncodeConfig(frames=FrameRule(fps=1.0, min_frames=2)))
    sample = encoder.encode(chat(VIDEO, text("?")), MEMBERS)
    # 11 frames at 4 per second, 2 of them taken: 2 / 11 * 4 sampled frames per second, two frames to a grid step.
    assert sample["second_per_grid_ts"].item() == pytest.approx(2 / (2 / 11 * 4))
    assert sample["video_grid_thw"][0, 0] == 1


@pytest.mark.parametrize("backend", ["decord", "av"])
def test_named_frames_and_backends_give_the_same_pixels(backend):
    encoder = Encoder(build_processor("qwen2_5_vl"), EncodeConfig(video_backend=backend))
    sample = encoder.encode(chat({**VIDEO, "frame_indices": [0, 5, 99]}, text("?")), MEMBERS)
    picked = decode_video(MEMBERS["2.mp4"], lambda _: [0, 5, 10, 10], "av").frames
    same = encoder.encode(chat({"type": "video", "video": picked, "fps": 4.0}, text("?")), {})
    assert torch.equal(sample["pixel_values_videos"], same["pixel_values_videos"])


def test_frame_list_of_members(qwen):
    members = {f"{i}.jpg": make_jpeg(56, 56, seed=i) for i in range(3)}
    item = {"type": "video", "video": list(members), "fps": 1.0}
    sample = qwen.encode(chat(item, text("?")), members)
    assert sample["video_grid_thw"][0, 0] == 2  # three frames, the last one twice
    assert sample["second_per_grid_ts"].item() == pytest.approx(2 / (4 / 3))


def test_sample_is_not_padded_and_not_shifted(qwen):
    sample = qwen.encode(chat(text("Hi")), {})
    length = len(sample["input_ids"])
    assert {len(sample[key]) for key in ("attention_mask", "labels", "mm_token_type_ids")} == {length}
    assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
    assert sample["attention_mask"].all()


@pytest.mark.parametrize("off", [{"train": False}, {"weight": 0}])
def test_single_turns_can_be_switched_off(qwen, off):
    conversation = [*chat(text("One?"), answer="First."), *chat(text("Two?"), answer="Second.")]
    conversation[1] |= off
    labels = qwen.encode(conversation, {})["labels"]
    assert qwen.processor.tokenizer.decode(labels[labels != IGNORE]) == "Second.<|im_end|>"


def test_switching_off_needs_one_answer_per_turn():
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' or loop.previtem['role'] == 'user' %}"
        "<|im_start|>{{ m['role'] }}\n{% endif %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}"
        "{% if loop.last or loop.nextitem['role'] == 'user' or m['role'] == 'user' %}<|im_end|>\n{% endif %}"
        "{% endfor %}"
    )
    encoder = Encoder(build_processor("qwen2_5_vl", chat_template=template))
    conversation = chat(text("Hi"), answer="One. ")
    conversation.append({"role": "assistant", "content": [text("Two.")]})
    labels = encoder.encode(conversation, {})["labels"]
    assert encoder.processor.tokenizer.decode(labels[labels != IGNORE]) == "One. Two.<|im_end|>"
    conversation[1]["train"] = False
    with pytest.raises(BadSampleError, match="wrote 1 answers for 2 assistant turns"):
        encoder.encode(conversation, {})


@pytest.mark.parametrize(
    "conversation",
    [
        [{"role": "user", "content": [text("Hi")]}],
        [{"role": "user", "content": [text("Hi")]}, {"role": "assistant", "content": "Yes", "train": False}],
    ],
)
def test_nothing_to_learn_is_a_bad_sample(qwen, conversation):
    with pytest.raises(BadSampleError, match="No token of the sample is to be learned") as caught:
        qwen.encode(conversation, {})
    assert (caught.value.stage, caught.value.reason) == ("encode", "no_labels")
    allowed = Encoder(qwen.processor, EncodeConfig(allow_unlabelled=True)).encode(conversation, {})
    assert (allowed["labels"] == IGNORE).all()


def test_overlong_is_bad_or_cut(qwen):
    conversation = chat(IMAGE, text("What?"), answer="word " * 50)
    whole = qwen.encode(conversation, MEMBERS)
    length = len(whole["input_ids"])
    exact = Encoder(qwen.processor, EncodeConfig(max_length=length))
    assert torch.equal(exact.encode(conversation, MEMBERS)["input_ids"], whole["input_ids"])
    with pytest.raises(BadSampleError, match=f"has {length} tokens, more than {length - 1}") as caught:
        Encoder(qwen.processor, EncodeConfig(max_length=length - 1)).encode(conversation, MEMBERS)
    assert caught.value.reason == "overlong"
    cut = Encoder(qwen.processor, EncodeConfig(max_length=length - 20, overlong="truncate")).encode(
        conversation, MEMBERS
    )
    for key in ("input_ids", "attention_mask", "labels", "mm_token_type_ids"):
        assert torch.equal(cut[key], whole[key][: length - 20])
    assert torch.equal(cut["pixel_values"], whole["pixel_values"])


def test_cut_never_goes_through_media_or_leaves_nothing_to_learn(qwen):
    conversation = chat(text("What is"), IMAGE, text("this? " * 30))
    ids = qwen.encode(conversation, MEMBERS)["input_ids"]
    inside = int((ids == qwen.processor.image_token_id).nonzero()[2])
    with pytest.raises(BadSampleError, match="would take media tokens away") as caught:
        Encoder(qwen.processor, EncodeConfig(max_length=inside, overlong="truncate")).encode(conversation, MEMBERS)
    assert caught.value.reason == "truncated_media"
    with pytest.raises(BadSampleError) as caught:
        Encoder(qwen.processor, EncodeConfig(max_length=60, overlong="truncate")).encode(conversation, MEMBERS)
    assert caught.value.reason == "no_labels"


def test_bad_media_are_bad_samples_that_name_the_member(qwen):
    with pytest.raises(BadSampleError, match=r"9\.jpg: the conversation names it") as caught:
        qwen.encode(chat({"type": "image", "image": "9.jpg"}), MEMBERS)
    assert (caught.value.stage, caught.value.reason) == ("decode", "missing_member")
    with pytest.raises(BadSampleError, match=r"0\.jpg: The image cannot be decoded") as caught:
        qwen.encode(chat(IMAGE), {"0.jpg": MEMBERS["0.jpg"][:-200]})
    assert caught.value.stage == "decode"
    with pytest.raises(BadSampleError, match=r"2\.mp4: The bytes are no video file"):
        qwen.encode(chat(VIDEO), {"2.mp4": b"nothing"})
    with pytest.raises(BadSampleError, match=r"3\.wav: Qwen2_5_VLProcessor does not read audio") as caught:
        qwen.encode(chat(AUDIO), MEMBERS)
    assert caught.value.reason == "unsupported_medium"


def test_what_the_processor_refuses_is_a_bad_sample(qwen):
    extreme = {"0.jpg": make_jpeg(2, 500)}
    with pytest.raises(BadSampleError, match="Qwen2_5_VLProcessor refused the sample") as caught:
        qwen.encode(chat(IMAGE), extreme)
    assert (caught.value.stage, caught.value.reason) == ("encode", "processor_error")


def test_images_and_videos_under_one_key_are_refused():
    encoder = Encoder(build_processor("smolvlm"))
    with pytest.raises(BadSampleError, match="would lose the images") as caught:
        encoder.encode(chat(IMAGE, VIDEO, text("?")), MEMBERS)
    assert caught.value.reason == "mixed_media"


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "kimi_k25", "llava_onevision"])
def test_fake_image_is_processed_but_invisible(family):
    processor = build_processor(family)
    plain = Encoder(processor).encode(chat(text("Hello there")), {})
    faked = Encoder(processor, EncodeConfig(inject_fake_image=True)).encode(chat(text("Hello there")), {})
    assert "pixel_values" in faked
    seen = faked["attention_mask"].bool()
    assert 0 < int((~seen).sum()) < len(seen)
    # What attention sees is the sample without the image (newlines beside a placeholder are text of the template).
    strip = lambda ids: processor.tokenizer.decode(ids).replace("\n", "").replace("image", "")  # noqa: E731
    assert strip(faked["input_ids"][seen]) == strip(plain["input_ids"])
    assert torch.equal(faked["labels"][faked["labels"] != IGNORE], plain["labels"][plain["labels"] != IGNORE])
    with_media = Encoder(processor, EncodeConfig(inject_fake_image=True)).encode(chat(IMAGE, text("Hi")), MEMBERS)
    assert with_media["attention_mask"].all()


def test_string_contents_and_list_contents_are_the_same(qwen):
    as_list = chat(text("Hello"), answer="Yes")
    as_text = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]
    one, other = qwen.encode(as_list, {}), qwen.encode(as_text, {})
    assert torch.equal(one["input_ids"], other["input_ids"])
    assert torch.equal(one["labels"], other["labels"])


STRING_ONLY = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
LIST_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for c in m['content'] %}"
    "{% if c is mapping %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize(("template", "form"), [(STRING_ONLY, "string"), (LIST_ONLY, "list")])
def test_templates_that_know_one_form_of_content_get_it(template, form):
    encoder = Encoder(build_processor("qwen2_5_vl", chat_template=template))
    assert encoder.chat.content_form == form
    as_list = chat(text("Hel"), text("lo"), answer="Yes")
    as_text = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Yes"}]
    one, other = encoder.encode(as_list, {}), encoder.encode(as_text, {})
    assert torch.equal(one["input_ids"], other["input_ids"])
    assert "{" not in encoder.processor.tokenizer.decode(one["input_ids"])
    assert (one["labels"] != IGNORE).any()


def test_string_template_refuses_media():
    encoder = Encoder(build_processor("qwen2_5_vl", chat_template=STRING_ONLY))
    with pytest.raises(BadSampleError, match="The chat template takes") as caught:
        encoder.encode(chat(IMAGE, text("?")), MEMBERS)
    assert caught.value.reason == "no_media_in_template"


def test_media_tokens_must_match_the_grids():
    template = STRING_ONLY.replace("{{ m['content'] }}", "{% for c in m['content'] %}{{ c['text'] }}{% endfor %}")
    encoder = Encoder(build_processor("qwen2_5_vl", chat_template=template))
    with pytest.raises(BadSampleError, match="holds 0 image and video tokens") as caught:
        encoder.encode(chat(IMAGE, text("?")), MEMBERS)
    assert caught.value.reason == "media_token_mismatch"


def test_image_options_are_passed():
    encoder = Encoder(build_processor("qwen2_5_vl"), EncodeConfig(limits=MediaLimits(image_pixels=10)))
    with pytest.raises(BadSampleError, match="more than the limit of 10"):
        encoder.encode(chat(IMAGE), MEMBERS)


def test_config_refuses_what_means_nothing():
    with pytest.raises(ConfigError, match="overlong='drop' means nothing"):
        EncodeConfig(overlong="drop")
    with pytest.raises(ConfigError, match="max_length=0 leaves nothing"):
        EncodeConfig(max_length=0)


def test_same_sample_twice_is_the_same(qwen):
    one, other = (qwen.encode(chat(IMAGE, VIDEO, text("?")), MEMBERS) for _ in range(2))
    assert all(np.array_equal(one[key].numpy(), other[key].numpy()) for key in one)


def test_arrays_that_a_processor_makes_itself_become_tensors():
    """Mllama writes its attention mask with numpy and leaves it to the library to turn it."""
    marks = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|image|>", "<|pad|>")
    tokenizer = train_tokenizer((*marks, "<|python_tag|>"), eos="<|eot_id|>", pad="<|pad|>", bos="<|begin_of_text|>")
    template = (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{% for c in m.content %}"
        "{% if c.type == 'image' %}<|image|>{% else %}{{ c.text }}{% endif %}{% endfor %}<|eot_id|>{% endfor %}"
    )
    images = MllamaImageProcessor(size={"height": 56, "width": 56}, max_image_tiles=2)
    processor = MllamaProcessor(images, tokenizer, chat_template=template)
    sample = Encoder(processor).encode(chat(IMAGE, text("What is it?")), MEMBERS)
    assert _takes_parts(processor, {}), "the slow way was taken"
    assert all(isinstance(value, torch.Tensor) for value in sample.values())
    assert "cross_attention_mask" in media_of(sample)
