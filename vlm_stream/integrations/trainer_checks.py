"""What trainers would ignore, cut or repeat, refused with a sentence before they train; and `vlm_stream.json`.

That file in the folder of a checkpoint holds what `loader.state_dict()` returned.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vlm_stream.errors import ConfigError, StateError
from vlm_stream.loader import StreamLoader
from vlm_stream.storage import open_store
from vlm_stream.stream import VLMStream

STATE_FILE: Final = "vlm_stream.json"

_LOG = logging.getLogger(__name__)
_HOOKS: Final = ("_init_training_state", "_run_epoch", "get_batch_samples", "set_initial_training_values")
_IGNORED: Final = {
    "dataloader_num_workers": (0, "num_workers"),
    "dataloader_prefetch_factor": (None, "prefetch_bytes"),
    "dataloader_persistent_workers": (False, None),
    "dataloader_drop_last": (False, None),
}
"""Arguments of Trainer's own data loaders: their default, and what a StreamLoader calls it."""


def check_datasets(datasets: Mapping[str, Any]) -> None:
    """Refuse bare streams: Trainer would collate their batches again, and accelerate would cut them."""
    for name, dataset in datasets.items():
        if any(isinstance(one, VLMStream) for one in _each(dataset)):
            raise ConfigError(
                f"{name} is a VLMStream, whose batches Trainer would collate again and cut by rows, so that tokens "
                f"would lose their pixels; give it a StreamLoader, which takes the same arguments"
            )
    if datasets["train_dataset"] is not None and datasets["train_dataset"] is datasets["eval_dataset"]:
        check_eval_loader(datasets["eval_dataset"])


def find_loaders(datasets: Mapping[str, Any]) -> list[StreamLoader]:
    """Return the loaders among the datasets."""
    return [one for dataset in datasets.values() for one in _each(dataset) if isinstance(one, StreamLoader)]


def find_eval_loader(trainer: Any, dataset: Any) -> StreamLoader | None:
    """Return the loader that an evaluation is about; None: it is about something else."""
    chosen = trainer.eval_dataset if dataset is None else dataset
    chosen = trainer.eval_dataset[chosen] if isinstance(chosen, str) else chosen
    check_datasets({"train_dataset": None, "eval_dataset": chosen})
    return chosen if isinstance(chosen, StreamLoader) else None


def check_eval_loader(loader: StreamLoader) -> None:
    """Refuse a loader that would give every evaluation other samples."""
    if loader.options.train:
        raise ConfigError(
            "eval_dataset is a StreamLoader for training, so every evaluation would see other samples; give it a "
            "StreamLoader with train=False"
        )


def check_release(trainer: type) -> None:
    """Refuse a release of transformers whose loop cannot be told where it stands."""
    missing = [name for name in _HOOKS if not hasattr(trainer, name)]
    if missing:
        from transformers import __version__

        raise ConfigError(
            f"the Trainer of transformers {__version__} has no {', '.join(missing)}, so it cannot be told where the "
            f"data stands; install transformers 5.3 or later: pip install 'vlm-stream[trainers]'"
        )


def check_no_trl(trainer: type) -> None:
    """Refuse TRL's trainers, whose constructors look into their datasets."""
    own = next((base.__name__ for base in trainer.__mro__ if base.__module__.partition(".")[0] == "trl"), None)
    if own is not None:
        raise ConfigError(
            f"TRL's {own} looks into its dataset and would not find its columns in a StreamLoader; for supervised "
            f"fine-tuning use StreamSFTTrainer (or StreamSFTMixin) of vlm_stream.integrations.trl"
        )


def check_arguments(trainer: Any, data_collator: Any) -> None:
    """Refuse arguments that contradict a loader; name those that are ignored."""
    args, train, held_out = trainer.args, trainer.train_dataset, trainer.eval_dataset
    eval_loaders = find_loaders({"eval_dataset": held_out})
    for loader in eval_loaders:
        check_eval_loader(loader)
    if not isinstance(train, StreamLoader) and not eval_loaders:
        return
    if args.n_gpu > 1:
        raise ConfigError(
            f"Trainer would spread each batch over {args.n_gpu} GPUs with nn.DataParallel, which cuts all tensors by "
            f"rows, so that tokens would lose their pixels; start a process for each GPU (torchrun --nproc-per-node "
            f"{args.n_gpu}), or show this one a single GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    if not isinstance(train, StreamLoader):
        return
    if data_collator is not None and len(eval_loaders) == len(_each(held_out)):
        raise ConfigError(
            "data_collator is given, but the batches of a StreamLoader are finished, so it would never be called; "
            "leave it out, or give the StreamLoader a collate_fn"
        )
    _check_steps(args, train)
    for name, (default, own) in _IGNORED.items():
        value = getattr(args, name, default)
        if value != default:
            _LOG.warning(
                "%s=%s is ignored by a StreamLoader%s", name, value, f": give it {own}= instead" if own else ""
            )


def _check_steps(args: Any, loader: StreamLoader) -> None:
    check_accumulation("Trainer", args.gradient_accumulation_steps, loader)
    strategy = "group_by_length" if getattr(args, "group_by_length", False) else None
    strategy = strategy or getattr(args, "train_sampling_strategy", "random")
    if strategy != "random":
        raise ConfigError(
            f"train_sampling_strategy={strategy!r} would be ignored, because a StreamLoader plans its own order; leave "
            f"it out, and give the StreamLoader mode='grouped' (rows of similar length) or shuffle=False"
        )
    if not loader.options.hf_labels:
        raise ConfigError(
            "the loader has hf_labels=False, so its labels are shifted, and the loss of a transformers model would "
            "shift them once more; leave hf_labels out"
        )
    if args.auto_find_batch_size:
        raise ConfigError(
            "auto_find_batch_size=True would begin again with the same batches, because a StreamLoader makes them; "
            "leave it out, and choose the pack_size or batch_size of the StreamLoader"
        )


def check_world(trainer: Any, loader: StreamLoader) -> None:
    """Refuse a trainer whose data-parallel ranks are not the loader's, or that cuts sequences."""
    for name, size in {"context": trainer.get_cp_size(), "sequence": trainer.get_sp_size()}.items():
        if size > 1:
            raise ConfigError(
                f"{name} parallelism of size {size} makes Trainer cut all tensors along the tokens, which fits neither "
                f"the pixels nor the positions of a StreamLoader's batches; train without it"
            )
    check_ranks("Trainer", trainer.args.world_size // trainer.get_tp_size(), loader)


def check_accumulation(trainer: str, steps: int, loader: StreamLoader) -> None:
    """Refuse a trainer that accumulates another number of batches than the loader plans for a step."""
    micro_batches = loader.options.micro_batches
    if steps != micro_batches:
        raise ConfigError(
            f"{trainer} has gradient_accumulation_steps={steps}, but the loader plans optimizer steps of "
            f"micro_batches={micro_batches}, so that loads and label counts would be those of other steps; make them "
            f"equal"
        )


def check_ranks(trainer: str, ranks: int, loader: StreamLoader) -> None:
    """Refuse a trainer with another number of data-parallel ranks than the loader's."""
    if loader.world.size != ranks:
        raise ConfigError(
            f"the loader deals its data to {loader.world.size} ranks and {trainer} has {ranks} data-parallel ones, so "
            f"samples would be lost or trained on several times; give the StreamLoader the model's device_mesh, or "
            f"leave out its rank and world_size"
        )


def _each(dataset: Any) -> list[Any]:
    if isinstance(dataset, dict):
        return list(dataset.values())
    return [] if dataset is None else [dataset]


def write_state(folder: Path, state: dict[str, Any]) -> None:
    """Write the state, so that there is all of it or nothing."""
    open_store(str(folder)).put(STATE_FILE, json.dumps(state).encode())


def read_state(folder: Path, *, may_be_missing: bool = False) -> dict[str, Any] | None:
    """Read the state; None if there is none and there may be none."""
    path = folder / STATE_FILE
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        if may_be_missing:
            return None
        raise StateError(
            f"the checkpoint {folder} has no {STATE_FILE}, so nobody knows which samples it was trained on, and "
            f"resuming would repeat some of them; resume from a checkpoint that was trained from a StreamLoader, or "
            f"pass ignore_data_skip=True to begin with the first sample again"
        ) from None
    except (ValueError, TypeError) as error:
        raise StateError(
            f"{path} is no JSON object ({error}), so the position in the data is lost; resume from an older checkpoint"
        ) from error
