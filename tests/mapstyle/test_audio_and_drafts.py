"""Speech datasets and collates; batches for draft models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vlm_stream.collate import default_collate_fn
from vlm_stream.errors import BadSampleError, ConfigError
from vlm_stream.mapstyle import (
    Source,
    build_dspark_vlm_dataloader,
    build_multi_en_source_mix,
    dspark_vlm_collate_fn,
    make_hf_audio_asr_dataset,
    make_multi_en_asr_dataset,
    qwen3_omni_asr_collate_fn,
)
from vlm_stream.mapstyle import audio as audio_module
from vlm_stream.testing import build_processor, make_wav

Samples = list[dict[str, Any]]


def clips() -> list[dict[str, Any]]:
    said = ["Hello!", " ", "the end", "<MUSIC>"]
    rows = [{"audio": {"bytes": make_wav(seconds=n + 0.5), "path": None}, "text": text} for n, text in enumerate(said)]
    return [*rows, {"audio": {"bytes": b"no sound", "path": None}, "text": "broken"}]


def test_clips_are_filtered_by_text_and_time(caplog: pytest.LogCaptureFixture) -> None:
    heard = make_hf_audio_asr_dataset(
        clips(),
        system_prompt="Listen.",
        user_prompt="Write.",
        min_audio_duration_seconds=1,
        max_audio_duration_seconds=3,
    )
    assert len(heard) == 1
    assert "1 of 5 clips have no text" in caplog.text
    assert "3 of 4 clips are left out: 2 last less than 1 or more than 3 seconds, 1 cannot be read" in caplog.text
    system, user, answer = heard[0]["conversation"]
    assert system == {"role": "system", "content": "Listen."}
    assert [item["type"] for item in user["content"]] == ["text", "audio"]
    assert user["content"][1]["audio"].shape == (int(2.5 * 16_000),)
    assert answer["content"][0]["text"] == "the end"
    assert isinstance(heard.read(0).conversation[1]["content"][1]["audio"], bytes)
    whole = make_hf_audio_asr_dataset(clips(), drop_empty_text=False)
    assert len(whole) == 5
    with pytest.raises(BadSampleError, match="the transcript in 'text' is empty"):
        whole[1]
    with pytest.raises(BadSampleError, match="not WAV, FLAC, Ogg or MP3"):
        whole[4]


def test_mixes_name_their_sources(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(audio_module, "_load", lambda given, *_: clips()[:4])
    corpora = [Source("a", "a", None, "train", "text"), {**vars(Source("b", "b", None, "train", "text")), "limit": 1}]
    mix = build_multi_en_source_mix(sources=corpora, shuffle_seed=None, min_audio_duration_seconds=None)
    assert [(row["source"], row["text"]) for row in mix] == [("a", "HELLO"), ("a", "THE END"), ("b", "HELLO")]
    assert "a: 2 of 4 clips have no text" in caplog.text
    talks = make_multi_en_asr_dataset(sources=corpora, max_audio_duration_seconds=None)
    assert [talk["conversation"][-1]["content"][0]["text"] for talk in talks] == ["THE END"]
    with pytest.raises(ConfigError, match=r"the keys \['repos'\]"):
        build_multi_en_source_mix(sources=[{"repos": "x"}])


def test_asr_batches() -> None:
    processor = build_processor("qwen3_omni_moe")
    wave = np.sin(np.arange(16_000) / 9).astype(np.float32)

    def talk(heard: Any, answer: str = "the end") -> dict[str, Any]:
        user = {"role": "user", "content": [{"type": "audio", "audio": heard}]}
        return {"conversation": [user, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]}

    batch = qwen3_omni_asr_collate_fn([talk(wave), talk(torch.tensor(wave[:8000]))], processor)
    assert batch["input_features"].shape[0] == 2
    assert batch["labels"].shape == batch["input_ids"].shape
    assert processor.tokenizer.decode(batch["labels"][0][batch["labels"][0] >= 0]) == "the end<|im_end|>"
    for bad, said in (
        (talk(wave, " "), "must end with an assistant turn"),
        (talk(wave[None]), r"has the shape \[1, 16000\]"),
        (talk("a.wav"), "is a str, not a wave"),
    ):
        with pytest.raises(ValueError, match=said):
            qwen3_omni_asr_collate_fn([talk(wave), bad], processor)


def test_drafts_are_not_shifted(processor: Any, samples: Samples, caplog: pytest.LogCaptureFixture) -> None:
    batch = dspark_vlm_collate_fn(samples[:2], processor, max_length=200)
    assert batch["input_ids"].shape == batch["loss_mask"].shape == (2, 200)
    assert "labels" not in batch
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert len(batch["image_grid_thw"]) == 2
    assert len(dspark_vlm_collate_fn(samples[:2], processor, 200, inject_fake_image=False)["image_grid_thw"]) == 1
    shifted = default_collate_fn(samples[1:2], processor)
    learned = shifted["labels"][shifted["labels"] >= 0]
    assert torch.equal(batch["input_ids"][1][batch["loss_mask"][1] == 1], learned)
    dspark_vlm_collate_fn(samples[6:7], processor, 70)
    assert "1 of 1 rows have no token to learn" in caplog.text
    with pytest.raises(BadSampleError, match="take media tokens away"):
        dspark_vlm_collate_fn(samples[1:2], processor, 16)


def test_draft_loaders(processor: Any, samples: Samples) -> None:
    options = {"processor": processor, "batch_size": 2, "max_length": 300, "shuffle": False}
    whole = build_dspark_vlm_dataloader(dataset_cfg=SimpleNamespace(build=lambda: samples), **options)
    assert [len(batch["input_ids"]) for batch in whole] == [2, 2, 2, 2]
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 1)
    half = build_dspark_vlm_dataloader(
        dataset_cfg=SimpleNamespace(instantiate=lambda: samples), distributed=True, dp_mesh=mesh, **options
    )
    assert [len(batch["input_ids"]) for batch in half] == [2, 2]
