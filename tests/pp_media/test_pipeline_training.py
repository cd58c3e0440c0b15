"""A tiny Qwen2.5-VL in two stages trains as the same model in one piece: loss and every gradient.

Two processes, gloo, `ScheduleGPipe` and `Schedule1F1B`, every media layout; each schedule runs two steps, the first
with its shape-inference forward.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from vlm_stream.collate import PositionRule, build_hf_pack, join_hf_packs
from vlm_stream.pp_media import VLM_PP_MEDIA_KEY, pp_chunk_specs, stage_vlm_media_for_pp, wrap_vlm_collate_for_pp

log = logging.getLogger(__name__)
EXACT = 1e-5
TIMEOUT_S = 240
SCRIPT = Path(__file__).with_name("run_stage.py")
ROOT = Path(__file__).parents[2]
FLAT = 1176  # values of one patch


def padded(rows: list[dict[str, Any]], rule: PositionRule, *, counts: bool = True) -> dict[str, Any]:
    """Collate single samples: right padding, a mask, multi-axis positions, shifted labels."""
    batch = join_hf_packs([build_hf_pack([row], positions=rule, hf_labels=False) for row in rows], media_counts=counts)
    batch["position_ids"] = batch["position_ids"][1:]
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]).long()
    return batch


def packed(rows: list[list[dict[str, Any]]], rule: PositionRule) -> dict[str, Any]:
    packs = [build_hf_pack(row, positions=rule, hf_labels=False, pad_to=256) for row in rows]
    return join_hf_packs(packs, media_counts=True)


def reshape_pixels(batch: dict[str, Any], *axes: int) -> dict[str, Any]:
    return batch | {"pixel_values": batch["pixel_values"].reshape(*axes)}


def make_cases(s: dict[str, dict[str, Any]], rule: PositionRule) -> dict[str, dict[str, Any]]:
    """Return cases: whole batches of two steps, and the micro-batches of each."""
    image, images, video, mixed, text, short = (s[k] for k in ("image", "images", "video", "mixed", "text", "short"))
    patches = len(image["pixel_values"])
    one_size = padded([other(image, i) for i in range(4)], rule)
    twice = padded([two_images(image), text], rule)
    return {
        "flat_with_counts_and_text_rows": {"n": 4, "steps": [padded([image, text, images, short], rule)] * 2},
        "text_micro_batch_first": {"n": 2, "steps": [padded([text, short, images, image], rule)] * 2},
        "flat_one_each": {"n": 2, "steps": [padded([other(image, i) for i in range(4)], rule, counts=False)] * 2},
        "padded_patches": {"n": 2, "steps": [reshape_pixels(one_size, 4, patches, FLAT)] * 2},
        "full_images": {"n": 4, "steps": [reshape_pixels(one_size, 4, patches, 3, FLAT // 3)] * 2},
        "two_images_and_none": {"n": 2, "steps": [reshape_pixels(twice, 2, patches, FLAT)] * 2},
        "videos_and_text": {"n": 2, "steps": [padded([video, text, mixed, short], rule)] * 2},
        "packed_rows": {"n": 2, "steps": [packed([[image, text, video], [short, mixed]], rule)] * 2},
        "packed_text_row": {"n": 3, "steps": [packed([[images, text], [text, short], [video, image]], rule)] * 2},
    }


def other(image: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a sample with another image of the same size and another answer, so that none can stand in for another."""
    labels = torch.where(image["labels"] >= 0, image["labels"] + number, image["labels"])
    return image | {"labels": labels, "pixel_values": image["pixel_values"].roll(7 * number, dims=1)}


def two_images(image: dict[str, Any]) -> dict[str, Any]:
    """Return one sample that shows two images."""
    return {key: torch.cat([value, other(image, 2)[key]]) for key, value in image.items()}


def swap_micro_batches(case: dict[str, Any]) -> dict[str, Any]:
    """Give every micro-batch the media of another."""
    swapped = [{key: value[::-1] for key, value in batch[VLM_PP_MEDIA_KEY].items()} for batch in case["steps"]]
    steps = [batch | {VLM_PP_MEDIA_KEY: media} for batch, media in zip(case["steps"], swapped, strict=True)]
    return case | {"steps": steps}


@pytest.fixture(scope="module")
def runs(encoded: dict[str, Any], net: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all cases in two processes and return what they wrote, with the cases."""
    folder = tmp_path_factory.mktemp("pipeline")
    rule = PositionRule.from_config(net.config)
    assert rule is not None
    cases = make_cases(encoded, rule)
    cut = {
        name: case | {"steps": [wrap_vlm_collate_for_pp(dict, case["n"])(batch) for batch in case["steps"]]}
        for name, case in cases.items()
    }
    cases["swapped"], cut["swapped"] = cases["padded_patches"], swap_micro_batches(cut["padded_patches"])
    torch.save({"cases": cut, "net": net}, folder / "cases.pt")
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    paths = [str(folder / "store"), str(folder / "cases.pt")]
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), *paths, str(folder / f"{rank}.pt")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    ranks = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    # Both steps of a case are the same batch.
    truth = {name: unsplit(net, case["steps"][0]) for name, case in cases.items()}
    return {"cut": cut, "ranks": ranks, "truth": truth}


def unsplit(net: Any, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    """Train the whole model on the whole batch."""
    inputs = {k: v for k, v in batch.items() if not k.startswith("n_")}
    labels = inputs.pop("labels")
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].reshape(-1, FLAT)
    net.zero_grad(set_to_none=True)
    logits = net(**inputs, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def whole_name(rank: int, name: str) -> str:
    """Return the name that a stage's parameter has in the whole model."""
    if rank == 0:
        return name
    if name.startswith("head."):
        return name.replace("head.", "lm_head.", 1)
    return name.replace("model.", "model.language_model.", 1).replace("layers.0.", "layers.1.")


CASES = (
    "flat_with_counts_and_text_rows",
    "text_micro_batch_first",
    "flat_one_each",
    "padded_patches",
    "full_images",
    "two_images_and_none",
    "videos_and_text",
    "packed_rows",
    "packed_text_row",
)


def differences(name: str, schedule: str, runs: dict[str, Any]) -> list[tuple[float, float]]:
    """Return for each step the relative difference of the loss, and the largest one of a gradient."""
    found = []
    loss, grads = runs["truth"][name]
    for step in range(2):
        parts = [rank[name, schedule]["steps"][step] for rank in runs["ranks"]]
        piped = {whole_name(rank, k): g for rank, part in enumerate(parts) for k, g in part["grads"].items()}
        assert piped.keys() == grads.keys()
        worst = max(float((g - piped[k]).norm() / g.norm()) for k, g in grads.items() if g.norm() > 0)
        found.append((abs(loss - parts[1]["loss"]) / loss, worst))
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", CASES)
def test_pipeline_equals_the_unsplit_model(name: str, schedule: str, runs: dict[str, Any]) -> None:
    found = differences(name, schedule, runs)
    log.info("relative differences (loss, worst gradient) by step: %s", found)
    assert max(max(pair) for pair in found) < EXACT


def test_the_check_sees_media_in_the_wrong_micro_batch(runs: dict[str, Any], net: Any) -> None:
    assert all(max(pair) > 100 * EXACT for pair in differences("swapped", "gpipe", runs))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("name", CASES)
def test_the_first_stage_reads_each_micro_batch_once(name: str, schedule: str, runs: dict[str, Any]) -> None:
    """The forward that infers shapes reads micro-batch 0 and moves nothing; text-only ones read nothing."""
    case = runs["cut"][name]
    for step, batch in enumerate(case["steps"]):
        media = batch[VLM_PP_MEDIA_KEY]
        grids = [media[key] for key in ("image_grid_thw", "video_grid_thw") if key in media]
        owned = [sum(len(grid[i]) for grid in grids) for i in range(case["n"])]
        assert runs["ranks"][0][name, schedule]["steps"][step]["taken"] == (owned[:1] if step == 0 else []) + owned


def test_uneven_micro_batches_get_their_own_media(encoded: dict[str, Any], net: Any) -> None:
    """Seven rows in three micro-batches are 3, 2, 2 where torch cuts.

    Torch's stages receive into buffers of the first micro-batch's shape, so only the first stage can run this.
    """
    spec = importlib.util.spec_from_file_location("run_stage", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    run_stage = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(run_stage)
    rule = PositionRule.from_config(net.config)
    kinds = ("images", "text", "image", "short", "video", "text", "mixed")
    batch = wrap_vlm_collate_for_pp(dict, 3)(padded([encoded[kind] for kind in kinds], rule))
    whole_media = {key: torch.cat(chunks) for key, chunks in batch[VLM_PP_MEDIA_KEY].items() if key in run_stage.MEDIA}
    kwargs = {key: batch[key] for key in ("position_ids", "attention_mask")}
    part = run_stage.FirstStage(copy.deepcopy(net))
    split = split_args_kwargs_into_chunks((batch["input_ids"],), kwargs, 3, kwargs_chunk_spec=pp_chunk_specs(kwargs))
    pp = SimpleNamespace(info=SimpleNamespace(has_first_stage=True, stages=None, schedule=None))
    with torch.no_grad():
        with stage_vlm_media_for_pp(pp, [part], batch):
            rows = [part(*args, **more) for args, more in zip(*split, strict=True)]
        whole = part.model(input_ids=batch["input_ids"], use_cache=False, **kwargs, **whole_media).last_hidden_state
    assert [len(row) for row in rows] == [3, 2, 2]
    real = kwargs["attention_mask"].bool()
    assert torch.allclose(torch.cat(rows)[real], whole[real], atol=1e-5)
