"""Families whose processors are remote code, with the smallest faithful stand-ins; and phi4, gemma4, omni, nemotron.

STAND-INS: `KimiVLProcessor`, `KimiK25Processor`, `NemotronParseProcessor` and `Phi4MMProcessor` ship in no wheel; those
of `tests.remote_processors` have their names and call signatures, a real tokenizer, and toy image parts.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.remote_processors import (
    PATCH,
    KimiK25Processor,
    KimiVLProcessor,
    NemotronParseProcessor,
    build_stand_in,
)
from vlm_stream.collate import (
    COLLATE_FNS,
    family_of,
    gemma4_inject_thinking_prefix,
    gemma4_prefix_collate_fn,
    get_collate,
    kimi_k25_vl_collate_fn,
    kimi_vl_collate_fn,
    nemotron_omni_collate_fn,
    nemotron_parse_collate_fn,
    phi4_mm_collate_fn,
    qwen3_omni_collate_fn,
    register_collate,
)
from vlm_stream.collate.family_steps import GEMMA4_THINKING_PREFIX
from vlm_stream.collate.kimi import expand_image_tokens
from vlm_stream.encode import IGNORE, Encoder
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.testing import build_processor, make_mp4, make_toy_image, make_wav


def example(words: str, *media: dict, answer: str = "Yes.") -> dict:
    return {
        "conversation": [
            {"role": "user", "content": [*media, {"type": "text", "text": words}]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
    }


def image(height: int = 28, width: int = 56) -> dict:
    return {"type": "image", "image": make_toy_image(height, width)}


def learned(labels: torch.Tensor, processor) -> str:
    return processor.tokenizer.decode(labels[labels != IGNORE])


@pytest.fixture(scope="module")
def kimi():
    return KimiK25Processor()


def test_kimi_vl(caplog):
    processor = KimiVLProcessor()
    examples = [example("What?", image()), example("Hello"), example("Two", image(), image(56, 56))]
    batch = kimi_vl_collate_fn(examples, processor)
    assert batch["n_images_per_sample"].tolist() == [1, 0, 2]
    pad = processor.tokenizer.convert_tokens_to_ids("<|media_pad|>")
    assert int((batch["input_ids"] == pad).sum()) == 2 + 2 + 4
    assert [learned(row, processor) for row in batch["labels"]] == ["Yes.<|im_end|>"] * 3
    fixed = kimi_vl_collate_fn([*examples, example("long " * 90)], processor, max_length=64)
    assert fixed["input_ids"].shape == (3, 63)
    assert "Dropped row 3" in caplog.text


class TestKimiK25:
    def test_placeholders_are_expanded_and_labels_follow(self, kimi):
        batch = kimi_k25_vl_collate_fn([example("Hi"), example("What?", image(28, 56), image(56, 56))], kimi)
        pad = kimi.tokenizer.convert_tokens_to_ids("<|media_pad|>")
        assert (batch["input_ids"] == pad).sum(dim=1).tolist() == [0, 2 + 4]
        assert batch["grid_thws"].tolist() == [[1, 2, 4], [1, 4, 4]]
        assert batch["image_grid_hws"].tolist() == [[2, 4], [4, 4]]
        assert batch["n_images_per_sample"].tolist() == [0, 2]
        assert batch["pixel_values"].shape == (24, 3, PATCH, PATCH)
        assert [learned(row, kimi) for row in batch["labels"]] == ["Yes.<|im_end|>"] * 2

    def test_fixed_length_cuts_and_takes_torn_images_out(self, kimi, caplog):
        examples = [example("What?", image(140, 140)), example("Hi", answer="word " * 60)]
        batch = kimi_k25_vl_collate_fn(examples, kimi, max_length=30)
        assert batch["input_ids"].shape == batch["labels"].shape == (2, 29)
        assert "tears an image" in caplog.text
        assert not {"pixel_values", "grid_thws", "n_images_per_sample"} & set(batch)
        assert not (batch["input_ids"] == kimi.tokenizer.convert_tokens_to_ids("<|media_pad|>")).any()

    def test_dropping(self, kimi):
        examples = [example("What?", image(140, 140)), example("Hi")]
        assert len(kimi_k25_vl_collate_fn(examples, kimi, 30, drop_overlong=True)["input_ids"]) == 1
        with pytest.raises(ValueError, match="All"):
            kimi_k25_vl_collate_fn(examples[:1], kimi, 30, drop_overlong=True)

    @pytest.mark.parametrize(("kernel", "count"), [((2, 2), 14 * 14), ((4, 4), 7 * 7)])
    def test_expansion(self, kernel, count):
        ids, mask = torch.tensor([5, 99, 6]), torch.tensor([1, 1, 1])
        wide, wide_mask = expand_image_tokens(ids, mask, torch.tensor([[3, 28, 28]]), 99, kernel)
        assert wide.tolist() == [5, *[99] * count, 6]
        assert wide_mask.tolist() == [1] * (count + 2)
        assert wide.dtype == ids.dtype
        assert expand_image_tokens(ids, mask, torch.tensor([[1, 4, 4]]), 7)[0] is ids
        with pytest.raises(ValueError, match="1 image placeholders and the processor gave 2 grids"):
            expand_image_tokens(ids, mask, torch.ones(2, 3).long(), 99)

    def test_class_of_transformers_takes_videos_too(self):
        processor = build_processor("kimi_k25")
        video = {"type": "video", "video": make_mp4(num_frames=6, height=64, width=64)}
        batch = kimi_k25_vl_collate_fn([example("a", image(), video), example("b")], processor, max_length=200)
        assert batch["input_ids"].shape == (2, 199)
        assert torch.equal(batch["grid_thws"], batch["image_grid_thw"])
        assert batch["n_videos_per_sample"].tolist() == [1, 0]


def test_nemotron_parse():
    processor = NemotronParseProcessor()
    examples = [example("", image(), answer="# Title <s> twice"), example("", image(20, 20), answer="x")]
    batch = nemotron_parse_collate_fn(examples, processor)
    assert [learned(row, processor) for row in batch["labels"]] == ["# Title <s> twice</s>", "x</s>"]
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert torch.equal(batch["decoder_input_ids"], batch["input_ids"])
    assert torch.equal(batch["decoder_attention_mask"], batch["attention_mask"])
    assert batch["n_images_per_sample"].tolist() == [1, 1]
    assert processor.tokenizer.decode(batch["decoder_input_ids"][0]).startswith("</s><s><predict_bbox>")
    assert "n_images_per_sample" not in nemotron_parse_collate_fn([example("no page")], processor)
    processor.tokenizer.pad_token = None
    processor.tokenizer.padding_side = "right"
    with pytest.raises(ValueError, match="names no padding token"):
        nemotron_parse_collate_fn([example("", image())], processor)


class TestPhi4:
    @pytest.fixture(scope="class")
    @classmethod
    def processor(cls):
        return build_processor("phi4_multimodal")

    @pytest.mark.parametrize("form", ["array", "pair", "dict"])
    def test_audio_beside_the_conversation(self, processor, form):
        wave = np.sin(np.arange(16000) / 20).astype(np.float32)
        audio = {"array": wave, "pair": (wave, 16000), "dict": {"array": wave, "sampling_rate": 16000}}[form]
        conversation = [{"role": "user", "content": "Transcribe."}, {"role": "assistant", "content": "A tone."}]
        batch = phi4_mm_collate_fn([{"conversation": conversation, "audio": audio}], processor)
        inside = {"type": "audio", "audio": wave}
        same = phi4_mm_collate_fn([example("Transcribe.", inside, answer="A tone.")], processor)
        assert batch["input_ids"].tolist() == same["input_ids"].tolist()
        assert torch.equal(batch["audio_input_features"], same["audio_input_features"])
        assert batch["input_mode"].item() == 2
        assert learned(batch["labels"], processor) == "A tone.<|end|>"
        assert conversation[0]["content"] == "Transcribe."

    def test_input_modes(self, processor):
        audio = {"type": "audio", "audio": make_wav(0.5)}
        modes = {(): 0, (1,): 1, (2,): 2, (1, 2): 3}
        for media, mode in modes.items():
            items = [{1: image(), 2: audio}[medium] for medium in media]
            batch = phi4_mm_collate_fn([example("?", *items)], processor)
            assert batch["input_mode"].item() == mode
            assert ("image_pixel_values" in batch) == (1 in media)

    def test_long_texts_are_cut_at_1024(self, processor):
        assert phi4_mm_collate_fn([example("?", answer="word " * 3000)], processor)["input_ids"].shape == (1, 1023)


class TestGemma4Prefix:
    @pytest.fixture(scope="class")
    @classmethod
    def processor(cls):
        return build_processor("gemma4")

    def test_prefix_is_inserted_and_not_learned(self, processor):
        examples = [example("Hi", image(), answer="Yes."), example("a longer question than that", answer="No, really.")]
        batch = gemma4_prefix_collate_fn(examples, processor)
        for row, answer in enumerate(("Yes.", "No, really.")):
            assert learned(batch["labels"][row], processor) == f"{answer}<turn|>"
            text = processor.tokenizer.decode(batch["input_ids"][row][batch["attention_mask"][row].bool()])
            assert f"<|turn>model\n{GEMMA4_THINKING_PREFIX}{answer}" in text
        assert batch["mm_token_type_ids"].shape == batch["input_ids"].shape
        image_id = processor.image_token_id
        assert torch.equal(batch["mm_token_type_ids"] == 1, batch["input_ids"] == image_id)

    def test_prefix_that_the_template_writes_is_masked_and_not_doubled(self, processor):
        written = processor.chat_template.replace(
            "<|turn>{{ role }}{{ '\\n' }}",
            "<|turn>{{ role }}{{ '\\n' }}{% if role == 'model' %}{{ '<|channel>thought\\n<channel|>' }}{% endif %}",
        )
        assert written != processor.chat_template
        renders = build_processor("gemma4", chat_template=written)
        examples = [example("Hi", answer="Yes.")]
        one, other = gemma4_prefix_collate_fn(examples, renders), gemma4_prefix_collate_fn(examples, processor)
        assert one["input_ids"].tolist() == other["input_ids"].tolist()
        assert one["labels"].tolist() == other["labels"].tolist()

    def test_single_samples_take_the_hook_too(self, processor):
        sample = Encoder(processor).encode(example("Hi")["conversation"], {})
        prefixed = gemma4_inject_thinking_prefix(sample, processor)
        extra = len(processor.tokenizer(GEMMA4_THINKING_PREFIX, add_special_tokens=False)["input_ids"])
        assert len(prefixed["input_ids"]) == len(sample["input_ids"]) + extra
        assert learned(prefixed["labels"], processor) == "Yes.<turn|>"

    def test_cut_into_media_is_refused(self, processor):
        with pytest.raises(BadSampleError, match="cuts into multimodal tokens"):
            gemma4_prefix_collate_fn([example("Hi", image())], processor, max_length=50)
        assert gemma4_prefix_collate_fn([example("Hi")], processor, max_length=50)["input_ids"].shape == (1, 49)


def test_nemotron_omni_frames_names_and_limits():
    processor = build_processor("nemotron_h_omni")
    video = {"type": "video", "video": make_mp4(num_frames=40, height=64, width=64, fps=2.0)}
    batch = nemotron_omni_collate_fn([example("?", video)], processor, max_video_frames=4)
    assert len(batch["pixel_values_videos"]) == 4
    assert batch["pixel_values_videos"].dtype == torch.bfloat16
    audio = {"type": "audio", "audio": (np.zeros(8000, dtype=np.float32), 8000)}
    native = nemotron_omni_collate_fn([example("?", audio, image())], processor, max_length=600)
    assert native["input_ids"].shape == (1, 599)
    assert "input_features" in native
    with pytest.raises(NotImplementedError, match="one video per sample"):
        nemotron_omni_collate_fn([example("?", video, video)], processor)

    remote = nemotron_omni_collate_fn([example("?", audio, image())], build_stand_in("nemotron_omni_remote"))
    assert "sound_features" in remote
    assert remote["image_flags"].shape[1] == 1


def test_qwen3_omni_pads_on_the_right_and_needs_utils_for_sound_tracks():
    processor = build_processor("qwen3_omni_moe")
    processor.tokenizer.padding_side = "left"
    examples = [example("?", {"type": "audio", "audio": make_wav(0.5)}), example("Hi")]
    batch = qwen3_omni_collate_fn(examples, processor)
    assert batch["attention_mask"][:, 0].all()
    with pytest.raises(ConfigError, match="qwen_omni_utils"):
        qwen3_omni_collate_fn(examples, processor, use_audio_in_video=True)


UTILS = """
from PIL import Image

def process_mm_info(conversation, use_audio_in_video):
    paths = [i["image"] for m in conversation for i in m["content"] if i["type"] == "image"]
    return None, [Image.open(path).convert("RGB") for path in paths] or None, None
"""


def test_qwen3_omni_reads_files_with_utils_where_they_are_installed(tmp_path, monkeypatch):
    """STAND-IN: `qwen_omni_utils` is not a dependency; the module here has its function and the form of its answer."""
    (tmp_path / "qwen_omni_utils.py").write_text(UTILS)
    make_toy_image(56, 84).save(tmp_path / "a.png")
    processor = build_processor("qwen3_omni_moe")
    examples = [example("What?", {"type": "image", "image": str(tmp_path / "a.png")}), example("Hi")]
    plain = qwen3_omni_collate_fn(examples, processor)
    monkeypatch.syspath_prepend(tmp_path)
    calls = []
    monkeypatch.setattr(type(processor), "__call__", _counted(type(processor).__call__, calls))
    batch = qwen3_omni_collate_fn(examples, processor)
    assert calls == [{"padding": True, "padding_side": "right", "use_audio_in_video": False, "return_tensors": "pt"}]
    assert set(batch) == set(plain)
    assert all(torch.equal(batch[key], plain[key]) for key in plain)


def _counted(function, calls):
    def call(self, text, images=None, **options):
        calls.append(options)
        return function(self, text=text, images=images, **options)

    return call


AUDIO = {"type": "audio", "audio": make_wav(0.5)}


@pytest.mark.parametrize(
    ("build", "collate", "media"),
    [
        (KimiVLProcessor, kimi_vl_collate_fn, [[image()], [], [image(), image(56, 56)]]),
        (KimiK25Processor, kimi_k25_vl_collate_fn, [[image()], [], [image(), image(56, 56)]]),
        (lambda: build_processor("kimi_k25"), kimi_k25_vl_collate_fn, [[image(56, 56)], []]),
        (NemotronParseProcessor, nemotron_parse_collate_fn, [[image()], [image(20, 20)]]),
        (lambda: build_processor("nemotron_h_omni"), nemotron_omni_collate_fn, [[image()], []]),
        (lambda: build_processor("phi4_multimodal"), phi4_mm_collate_fn, [[AUDIO], [], [AUDIO]]),
        (lambda: build_processor("llava_onevision"), COLLATE_FNS["LlavaOnevisionProcessor"], [[image()], []]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_rows_encoded_one_by_one_make_the_batch_of_the_family(build, collate, media):
    processor = build()
    processor.tokenizer.padding_side = "right"
    examples = [example("What? " * (number + 1), *items) for number, items in enumerate(media)]
    encoder = Encoder(processor, steps=family_of(processor).steps_for(processor))
    rows = [encoder.encode(e["conversation"], {}) for e in examples]
    ours, theirs = family_of(processor).collate_rows(rows, processor), collate(examples, processor)
    # Families without grids count media in conversations; a stream knows the counts without looking at rows.
    assert set(theirs) - set(ours) <= {"n_images_per_sample", "n_videos_per_sample"}
    assert not set(ours) - set(theirs)
    for key in ours:
        assert torch.equal(ours[key], theirs[key]), key


def test_registry(caplog):
    class MyProcessor:
        pass

    assert get_collate(MyProcessor()).__name__ == "default_collate_fn"
    assert "No collate function is registered for MyProcessor" in caplog.text

    @register_collate("MyProcessor")
    def mine(examples, processor):
        return {"mine": examples}

    try:
        assert get_collate(MyProcessor()) is mine
    finally:
        del COLLATE_FNS["MyProcessor"]
    wanted = {
        "Qwen2_5_VLProcessor": "qwen2_5_collate_fn",
        "Qwen3OmniMoeProcessor": "qwen3_omni_collate_fn",
        "KimiVLProcessor": "kimi_vl_collate_fn",
        "KimiK25Processor": "kimi_k25_vl_collate_fn",
        "Kimi_K25Processor": "kimi_k25_vl_collate_fn",
        "NemotronParseProcessor": "nemotron_parse_collate_fn",
        "NemotronH_Nano_Omni_Reasoning_V3Processor": "nemotron_omni_collate_fn",
        "LlavaOneVisionProcessor": "llava_onevision_collate_fn",
        "LlavaOnevisionProcessor": "llava_onevision_collate_fn",
        "default": "default_collate_fn",
    }
    assert wanted.items() <= {name: fn.__name__ for name, fn in COLLATE_FNS.items()}.items()
