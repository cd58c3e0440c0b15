"""Batches for training a draft model (DSpark, speculative decoding): nothing is shifted, a mask says what is learned.

Enters: conversations, or a dataset config. Leaves: batches of one fixed length whose `loss_mask` runs along the tokens;
draft models find their targets themselves.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from vlm_stream.collate import merge_media, pad_id_of, pad_rows
from vlm_stream.encode import IGNORE, EncodeConfig, Encoder, tokenizer_of

logger = logging.getLogger(__name__)


def dspark_vlm_collate_fn(
    examples: Sequence[Mapping[str, Any]], processor: Any, max_length: int, inject_fake_image: bool = True
) -> dict[str, Any]:
    """Collate conversations without a shift.

    Args:
        examples: `{"conversation": [...]}`.
        processor: The model's processor; rows are padded on its tokenizer's side.
        max_length: Tokens of every row; longer ones are cut, never through media.
        inject_fake_image: Give rows without media an image that attention does not see. Off for drafts that look for
            image tokens themselves.

    Returns:
        The processor's batch, pixels in bfloat16, and `loss_mask` `[B, S]`, 1 where a token is to be learned.

    Raises:
        BadSampleError: A cut would take media tokens away.
    """
    config = EncodeConfig(
        max_length=max_length, overlong="truncate", inject_fake_image=inject_fake_image, allow_unlabelled=True
    )
    encoder = Encoder(processor, config)
    rows = [encoder.encode(example["conversation"], {}) for example in examples]
    side = getattr(tokenizer_of(processor), "padding_side", "right")
    tokens = pad_rows(rows, pad_id=pad_id_of(processor), length=max_length, side=side)
    learned = tokens.pop("labels") != IGNORE
    idle = int((~learned.any(dim=1)).sum())
    if idle:
        logger.warning(
            "%d of %d rows have no token to learn within %d: no answer is left.", idle, len(rows), max_length
        )
    return {**tokens, **merge_media(rows, pixel_dtype=torch.bfloat16), "loss_mask": learned.long()}


def build_dspark_vlm_dataloader(
    *,
    dataset_cfg: Any,
    processor: Any,
    batch_size: int,
    max_length: int,
    shuffle: bool,
    num_workers: int = 0,
    distributed: bool = False,
    dp_mesh: Any = None,
    inject_fake_image: bool = True,
) -> DataLoader[Any]:
    """Return a loader of such batches.

    Args:
        dataset_cfg: Something with `instantiate()` (NeMo Automodel's config nodes) or `build()`, which returns
            conversations.
        processor: The model's processor.
        batch_size: Rows of a batch.
        max_length: Tokens of a row.
        shuffle: Whether samples come in another order in every epoch.
        num_workers: Of torch's loader; they live as long as it does.
        distributed: Deal samples out to data-parallel ranks.
        dp_mesh: Their device mesh; None: the default process group.
        inject_fake_image: As for `dspark_vlm_collate_fn`.
    """
    dataset = (dataset_cfg.instantiate if hasattr(dataset_cfg, "instantiate") else dataset_cfg.build)()
    sampler: DistributedSampler[Any] | None = None
    if distributed:
        size, rank = (None, None) if dp_mesh is None else (dp_mesh.size(), dp_mesh.get_local_rank())
        sampler = DistributedSampler(dataset, size, rank, shuffle)
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        shuffle=shuffle and sampler is None,
        num_workers=num_workers,
        # The model that is to be drafted for is on its device by then, and CUDA does not survive a fork.
        multiprocessing_context="forkserver" if num_workers and torch.cuda.is_available() else None,
        persistent_workers=num_workers > 0,
        pin_memory=torch.cuda.is_available(),
        collate_fn=partial(
            dspark_vlm_collate_fn, processor=processor, max_length=max_length, inject_fake_image=inject_fake_image
        ),
    )
