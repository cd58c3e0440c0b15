"""One process of a two-stage pipeline: `run_stage.py RANK STORE CASES RESULTS`.

Trains every case twice with both schedules, and writes the losses and the gradients of this rank's stage. The first
step of a schedule begins with the forward by which it infers shapes, the second has none.
"""

from __future__ import annotations

import copy
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

from vlm_stream.pp_media import drop_vlm_media, pp_chunk_specs, stage_vlm_media_for_pp, take_vlm_media

MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class FirstStage(torch.nn.Module):
    """Embeddings, vision tower and the first layer."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.model = net.model
        self.model.language_model.layers = self.model.language_model.layers[:1]
        self.model.language_model.norm = torch.nn.Identity()
        self.taken: list[int] = []

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        media = take_vlm_media(self, MEDIA)
        if "pixel_values" in media:  # whatever the layout was, the tower takes flat patches
            media["pixel_values"] = media["pixel_values"].reshape(-1, 1176)
        self.taken.append(len(media.get("image_grid_thw", ())) + len(media.get("video_grid_thw", ())))
        hidden: torch.Tensor = self.model(input_ids=input_ids, use_cache=False, **kwargs, **media).last_hidden_state
        return hidden


class LastStage(torch.nn.Module):
    """The last layer, the norm and the head."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.model = net.model.language_model
        self.model.layers = self.model.layers[1:]
        self.head = net.lm_head

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        out: torch.Tensor = self.head(self.model(inputs_embeds=hidden, use_cache=False, **kwargs).last_hidden_state)
        return out


def summed_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def run_case(rank: int, net: Any, case: dict[str, Any], schedule_name: str) -> dict[str, Any]:
    part = (FirstStage if rank == 0 else LastStage)(copy.deepcopy(net))
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    steps = []
    schedule: Any = None
    for batch in case["steps"]:
        batch = dict(batch)
        if rank == 1:
            drop_vlm_media(batch)  # what a loader of this rank delivers
        ids, labels = batch.pop("input_ids"), batch.pop("labels")
        kwargs = {key: batch[key] for key in ("position_ids", "attention_mask") if key in batch}
        if schedule is None:
            make = SCHEDULES[schedule_name]
            specs = pp_chunk_specs(kwargs)
            schedule = make(stage, case["n"], loss_fn=summed_loss, kwargs_chunk_spec=specs, scale_grads=False)
        pp = SimpleNamespace(info=SimpleNamespace(has_first_stage=rank == 0, stages=[stage], schedule=schedule))
        part.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        with stage_vlm_media_for_pp(pp, [part], batch):
            if rank == 0:
                schedule.step(ids, **kwargs)
            else:
                schedule.step(target=labels, losses=losses, **kwargs)
        grads = {name: p.grad.clone() for name, p in part.named_parameters() if p.grad is not None}
        steps.append({"loss": sum(loss.item() for loss in losses), "grads": grads, "taken": getattr(part, "taken", [])})
        part.taken = []
    return {"steps": steps}


def main(rank: int, store: str, cases_path: str, results_path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    loaded = torch.load(cases_path, weights_only=False)
    results = {}
    for name, case in loaded["cases"].items():
        for schedule_name in SCHEDULES:
            results[name, schedule_name] = run_case(rank, loaded["net"], case, schedule_name)
    torch.save(results, results_path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
