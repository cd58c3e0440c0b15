"""`Run`: everything that a trainer under test is given; and its toy shards, images and text, counted exactly."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.testing.conformance.record import watch, write_line

if TYPE_CHECKING:
    from vlm_stream.loader import StreamLoader
    from vlm_stream.stream import VLMStream

__all__ = ["PACK_SIZE", "Run", "make_data", "open_processor"]

PACK_SIZE: Final = 900
_SAMPLES: Final = 80
_LIMITS: Final = {"size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 16 * 28 * 28}}


def make_data(folder: str | Path) -> Path:
    """Write shards and a processor for `check` and `Run` into a folder, unless they are there; return the folder.

    The epoch of two ranks with two micro-batches a step has six steps, and the last of them is not full.
    """
    from vlm_stream.convert import make_shards
    from vlm_stream.testing.processors import build_processor
    from vlm_stream.testing.toy_data import make_toy_dataset

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
        from vlm_stream.stream import VLMStream

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
        from vlm_stream.testing.models import build_tiny_model

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
        from vlm_stream.loader import StreamLoader

        return StreamLoader(self.sources, **self._arguments(changes))

    def _arguments(self, changes: dict[str, Any]) -> dict[str, Any]:
        # Every rank runs its vision tower in every micro-batch: without it, gradients are missing on some of them.
        arguments = {"pack_size": PACK_SIZE, "fake_image": True} | self.options | changes
        return arguments if "processor" in arguments else arguments | {"processor": self.processor()}
