"""Tiny real models take the batches: forward and backward on the CPU, with the loss that one computes by hand."""

from __future__ import annotations

import pytest
import torch

from vlm_stream.collate import get_collate, neat_packed_vlm_collater, pad_collate_fn
from vlm_stream.encode import IGNORE, EncodeConfig, Encoder
from vlm_stream.testing import MODEL_FAMILIES, build_processor, build_tiny_model, make_mp4, make_toy_image

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")

VIDEO = {"type": "video", "video": make_mp4(num_frames=5, height=64, width=64)}


def example(words: str, *media: dict) -> dict:
    return {
        "conversation": [
            {"role": "user", "content": [*media, {"type": "text", "text": words}]},
            {"role": "assistant", "content": [{"type": "text", "text": "A red square."}]},
        ]
    }


def image(seed: int) -> dict:
    return {"type": "image", "image": make_toy_image(56 + 28 * seed, 84, seed)}


def model_inputs(batch: dict, model) -> dict:
    """Return what the model takes: labels that are shifted already go in beside those that it would shift itself."""
    known = {key: value for key, value in batch.items() if not key.startswith("n_") and key != "labels"}
    pixels = {k: v.float() if v.is_floating_point() else v for k, v in known.items() if isinstance(v, torch.Tensor)}
    return pixels | {"labels": batch["labels"], "shift_labels": batch["labels"]}


@pytest.mark.parametrize("family", MODEL_FAMILIES)
def test_forward_and_backward(family):
    processor = build_processor(family)
    model = build_tiny_model(family, processor)
    kinds = {"image": [[image(0)], [image(1)]], "images": [[image(0), image(1)]], "mixed": [[], [image(0)]]}
    kinds |= {"text": [[], []], "video": [[VIDEO], []]}
    for kind, rows in kinds.items():
        if kind == "video" and "video" not in Encoder(processor).reads.media:
            continue
        batch = get_collate(processor)(
            [example("What is it? " * (i + 1), *row) for i, row in enumerate(rows)], processor
        )
        out = model(**model_inputs(batch, model))
        assert torch.isfinite(out.loss), (family, kind)
        by_hand = torch.nn.functional.cross_entropy(
            out.logits.float().flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORE
        )
        assert out.loss.item() == pytest.approx(by_hand.item(), rel=1e-4), (family, kind)
        model.zero_grad()
        out.loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(torch.isfinite(grad).all() for grad in grads)
        assert any(grad.abs().sum() > 0 for grad in grads)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_fake_image_changes_no_logit(family):
    """The text after a hidden image is predicted as if it were not there, positions aside."""
    processor = build_processor(family)
    model = build_tiny_model(family, processor).eval()
    conversation = example("Hello there")["conversation"]
    plain = pad_collate_fn([Encoder(processor).encode(conversation, {})], processor)
    faked = pad_collate_fn(
        [Encoder(processor, EncodeConfig(inject_fake_image=True)).encode(conversation, {})], processor
    )
    seen = faked["attention_mask"][0].bool()
    positions = torch.zeros_like(faked["input_ids"])
    positions[0, seen] = torch.arange(int(seen.sum()))
    with torch.no_grad():
        expected = model(**{k: v for k, v in model_inputs(plain, model).items() if "labels" not in k}).logits[0]
        inputs = {k: v for k, v in model_inputs(faked, model).items() if "labels" not in k}
        ours = model(**inputs, position_ids=positions.expand(3, 1, -1)).logits[0]
    assert torch.allclose(ours[seen], expected, atol=1e-4)


def test_packed_documents_do_not_see_each_other():
    processor = build_processor("qwen2_5_vl")
    model = build_tiny_model("qwen2_5_vl", processor).eval()
    samples = [Encoder(processor).encode(example(words)["conversation"], {}) for words in ("Hi", "What is it?")]
    rows = [{k: v[1:] if k == "labels" else v[:-1] for k, v in s.items()} for s in samples]
    lengths = [len(row["input_ids"]) for row in rows]
    pack = {key: torch.cat([row[key] for row in rows]) for key in ("input_ids", "labels", "mm_token_type_ids")}
    pack["attention_mask"] = torch.cat([torch.full((n,), d) for d, n in enumerate(lengths, 1)])
    pack["position_ids"] = torch.cat([torch.arange(n) for n in lengths]).expand(3, -1)
    batch = neat_packed_vlm_collater([pack], max_length=sum(lengths) + 3)
    with torch.no_grad():
        together = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"],
            use_cache=False,
        ).logits[0]
        begin = 0
        for row, length in zip(rows, lengths, strict=True):
            alone = model(input_ids=row["input_ids"][None], use_cache=False).logits[0]
            assert torch.allclose(together[begin : begin + length], alone, atol=1e-4)
            begin += length
    assert torch.isfinite(together).all()
