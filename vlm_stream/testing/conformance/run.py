"""`Run`: everything that a trainer under test is given; its toy shards; and hooks that record what it trains on.

The hooks sit on the model and the optimizer, in whatever the trainer wraps them. They write a line of JSON for each
event, in a file for each rank, closed before training goes on: SIGKILL loses nothing. They are module-level functions
over a frozen `Run`, so that models may be copied and pickled with them.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from vlm_stream.convert import make_shards
from vlm_stream.loader import StreamLoader
from vlm_stream.stream import VLMStream
from vlm_stream.testing.models import build_tiny_model
from vlm_stream.testing.processors import build_processor
from vlm_stream.testing.toy_media import make_toy_dataset

PACK_SIZE: Final = 900
_SAMPLES: Final = 80
_LIMITS: Final = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28}}


def make_data(folder: str | Path) -> Path:
    """Write shards and a processor for `check` and `Run` into a folder, unless they are there; return the folder.

    The epoch of two ranks with two micro-batches a step has six steps, and the last of them is not full.
    """
    folder = Path(folder)
    if (folder / "shards" / "dataset.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    processor = build_processor("qwen2_5_vl", image=_LIMITS, video=_LIMITS | {"cap_pixels_per_frame": False})
    processor.save_pretrained(folder / "processor")
    meta = make_toy_dataset(folder / "toy", num_samples=_SAMPLES)
    make_shards(
        meta,
        folder / "shards",
        processor=str(folder / "processor"),
        names=("captions", "dialogues"),
        samples_per_shard=10,
    )
    return folder


def open_processor(folder: Path) -> Any:
    """Return the processor that `make_data` wrote."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder / "processor")  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: data, a model that writes down what it is given, and what is to be done.

    >>> def train(run):                                       # doctest: +SKIP
    ...     loader, model = run.loader(), run.model()
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=run.learning_rate)
    """

    data: Path
    """What `make_data` wrote."""
    folder: Path
    """For checkpoints. The trainer may write into it what it likes."""
    records: Path
    """Where the hooks write. Not for the trainer."""
    world: int = 1
    """Ranks of this launch: for trainers that start their own processes."""
    accumulation: int = 2
    """Micro-batches of an optimizer step."""
    learning_rate: float = 1e-3
    """Of the first step; falls by the same amount after each, to 0 after the last step of the epoch."""
    max_steps: int | None = None
    """Optimizer steps after which training ends, counted from the start of the epoch; None: with the epoch."""
    save_after: int | None = None
    """Optimizer steps after which a checkpoint is saved, once; None: save nothing."""
    resume: bool = False
    """Go on from the checkpoint in `folder`."""
    evaluations: int = 0
    """How often all of `eval_loader()` is to be evaluated: any time, in eval mode."""
    kill_after: int | None = None
    """Training forwards after which each process kills itself. Not for the trainer: the model does it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further arguments of every `StreamLoader`."""

    def loader(self, **changes: Any) -> StreamLoader:
        """Return a new loader over the training data; keywords replace or add arguments."""
        return self._loader({"micro_batches": self.accumulation} | changes)

    def eval_loader(self, **changes: Any) -> StreamLoader:
        """Return a new loader over the evaluation data (the same samples, in order)."""
        return self._loader({"train": False} | changes)

    def stream(self, **changes: Any) -> VLMStream:
        """Return the training data as an IterableDataset, for trainers that bring their own loader."""
        return VLMStream(self.sources, **self._arguments({"micro_batches": self.accumulation} | changes))

    @property
    def sources(self) -> str:
        """Return where the shards are."""
        return str(self.data / "shards")

    def processor(self) -> Any:
        """Return the processor of the data."""
        return open_processor(self.data)

    def model(self) -> Any:
        """Return a tiny Qwen2.5-VL, with the same weights in every process, whose forwards are recorded.

        Its config is that of a published model: packed batches want `use_cache=False`, as they do outside of tests.
        """
        return watch(build_tiny_model("qwen2_5_vl", self.processor()), self)

    def tell(self, **facts: float | None) -> None:
        """Write down numbers as the trainer has them: `length=len(loader)`, `total_steps=` of its schedule."""
        write_line(self, {"kind": "tell", "facts": facts})

    def to_file(self, path: Path) -> Path:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), default=str, indent=1), encoding="utf-8")
        return path

    @classmethod
    def from_file(cls, path: str | Path) -> Run:
        """Read what `to_file` wrote."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        paths = {name: Path(values[name]) for name in ("data", "folder", "records")}
        return cls(**{one.name: values[one.name] for one in fields(cls)} | paths)

    def _loader(self, changes: dict[str, Any]) -> StreamLoader:
        return StreamLoader(self.sources, **self._arguments(changes))

    def _arguments(self, changes: dict[str, Any]) -> dict[str, Any]:
        # Every rank runs its vision tower in every micro-batch: without it, gradients are missing on some of them.
        arguments = {"pack_size": PACK_SIZE, "fake_image": True} | self.options | changes
        return arguments if "processor" in arguments else arguments | {"processor": self.processor()}


Keys: TypeAlias = dict[str, str]
"""Of one batch: a digest for each key."""

_forwards = 0
"""Training forwards of this process."""
_watching = False
"""Whether this process has the optimizer's hook."""


def watch(model: Any, run: Run) -> Any:
    """Return the model with its forwards recorded, and record the steps of every optimizer of this process."""
    global _watching
    model.register_forward_pre_hook(functools.partial(_see_forward, run), with_kwargs=True)
    if not _watching:
        _watching = True
        register_optimizer_step_post_hook(functools.partial(_see_step, run, model))
    return model


def digest(value: Any) -> str:
    """Return what identifies a value, wherever it lies: of a tensor its dtype, shape and bytes."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    form = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return f"{form} {hashlib.blake2b(raw, digest_size=8).hexdigest()}"


def digests(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest for each key. Label counts are numbers: trainers may send them in another form."""
    found = {key: digest(value) for key, value in batch.items() if value is not None}
    if batch.get("num_items_in_batch") is not None:
        found["num_items_in_batch"] = str(int(batch["num_items_in_batch"]))
    return found


def write_line(run: Run, line: dict[str, Any]) -> None:
    """Append an event to this rank's file."""
    run.records.mkdir(parents=True, exist_ok=True)
    rank, world = _place()
    with (run.records / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**line, "rank": rank, "world": world, "pid": os.getpid()}) + "\n")


def _place() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _see_forward(run: Run, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _forwards
    named = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
    write_line(run, {"kind": "train" if module.training else "eval", "keys": digests(named)})
    if module.training:
        _forwards += 1
        if run.kill_after is not None and _forwards >= run.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)


def _see_step(run: Run, model: Any, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    # After the step, not before it: a trainer that hands over a closure has its gradients only then.
    rate = float(optimizer.param_groups[0]["lr"])
    if rate == 0:  # torch.distributed.checkpoint makes such a step to have an optimizer's state allocated
        return
    write_line(run, {"kind": "step", "lr": rate})
    rank, _ = _place()
    path = run.records / f"gradients-{rank}.pt"
    if path.exists():
        return
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            whole = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            gradients[name] = whole.detach().to("cpu", torch.float32).clone()
    torch.save(gradients, path)


@dataclass(frozen=True, slots=True)
class Records:
    """What the ranks of one launch were given, by rank."""

    train: dict[int, list[Keys]]
    """Batches of the forwards in training mode."""
    evaluated: dict[int, list[Keys]]
    """Those in eval mode."""
    rates: dict[int, list[float]]
    """Learning rates of the optimizer steps."""
    told: dict[int, dict[str, float | None]]
    """What the trainer told with `run.tell`."""
    worlds: set[int]
    """Sizes of the world as the processes saw it at training forwards."""
    gradients: dict[int, dict[str, Any]]
    """Of the first optimizer step, by name of the parameter."""

    @classmethod
    def read(cls, folder: Path) -> Records:
        """Read the records of a launch."""
        found = cls(train={}, evaluated={}, rates={}, told={}, worlds=set(), gradients={})
        for path in sorted(folder.glob("rank-*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                found._add(json.loads(line))
        for path in folder.glob("gradients-*.pt"):
            found.gradients[int(path.stem.split("-")[1])] = torch.load(path, weights_only=True)
        return found

    def _add(self, line: dict[str, Any]) -> None:
        rank = line["rank"]
        if line["kind"] == "train":
            self.train.setdefault(rank, []).append(line["keys"])
            self.worlds.add(line["world"])
        elif line["kind"] == "eval":
            self.evaluated.setdefault(rank, []).append(line["keys"])
        elif line["kind"] == "step":
            self.rates.setdefault(rank, []).append(line["lr"])
        else:
            self.told.setdefault(rank, {}).update(line["facts"])
