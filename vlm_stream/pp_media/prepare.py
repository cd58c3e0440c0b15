"""A collated batch -> the same batch with its media cut per micro-batch -> one call of the schedule on them.

Enters: what a collate function returned. Leaves: that mapping, its media tensors replaced by `VLM_PP_MEDIA_KEY`, a
mapping of lists; then attributes on the first part of the pipeline that its forward reads, removed when the call ends.
Knows the names under which families emit media, and which of them hold a row per image or per video.

The forward of the first stage does not learn from torch which micro-batch it runs, so a cursor on the module tells it.
Before each micro-batch the cursor is set to that micro-batch's number, whatever happened before: neither a text-only
micro-batch whose forward read nothing, nor the forward with which a schedule infers shapes, moves the media of others.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, TypeAlias

import torch

from vlm_stream import keys
from vlm_stream.pixels import DEFAULT_DTYPE, finish_pixels
from vlm_stream.pp_media.cut import (
    Bounds,
    MediaCutError,
    as_counts,
    chunk_crops,
    chunk_step3_media,
    chunk_vlm_media,
    cut_rows,
    item_bounds,
    microbatch_bounds,
    owned_rows,
    patches_per_item,
    samples_own,
)

Batch: TypeAlias = MutableMapping[str, Any]

VLM_PP_MEDIA_KEY: Final = "_vlm_pp_media_chunks"
"""Key of a prepared batch: its media, as lists with an entry for each micro-batch."""
_IMAGES, _VIDEOS = keys.PIXEL_KEYS
_CURSOR: Final = "_vlm_chunk_idx"
_ALL_CHUNKS: Final = "_vlm_media_chunks"
_IMAGE_KEYS: Final = ("pixel_values", "image_grid_hws", "num_patches", "patch_pixel_values", "patch_newline_mask")
_VIDEO_KEYS: Final = ("pixel_values_videos", "video_grid_thw")
_ATTRIBUTES: Final = (*(f"_vlm_{key}_chunks" for key in (*_IMAGE_KEYS, *_VIDEO_KEYS)), _CURSOR, _ALL_CHUNKS)


def drop_vlm_media(batch: Batch) -> Batch:
    """Remove every media tensor, cut or not: what ranks without the first stage have no use for."""
    for key in (*keys.MEDIA_KEYS, keys.PIXEL_SPEC_KEY, VLM_PP_MEDIA_KEY):
        batch.pop(key, None)
    return batch


def prepare_vlm_media_for_pp(
    batch: Batch, batch_size: int, n_microbatches: int, *, owned: Mapping[str, Sequence[int]] | None = None
) -> Batch:
    """Replace the media tensors of a batch by lists with one entry per micro-batch.

    Torch would cut the flat media tensors by rows like everything else, and give samples the pixels of others.

    Args:
        batch: A collated batch; changed in place.
        batch_size: Its rows. A pack is one row, with the media counts of all its documents.
        n_microbatches: Micro-batches that the schedule runs.
        owned: Further media that belong to rows (sound, say), and how many entries each row has of them.

    Returns:
        The batch, with `VLM_PP_MEDIA_KEY` if it had pixels. Compact pixels stay so, and the mapping says how to finish
        them.

    Raises:
        MediaCutError: The counts, grids and pixels do not fit together (a `ValueError`).
    """
    bounds = microbatch_bounds(batch_size, n_microbatches)
    further = {key: batch.pop(key) for key in owned or {} if key in batch}
    media = {key: batch.pop(key) for key in keys.MEDIA_KEYS if key in batch}
    compact = batch.pop(keys.PIXEL_SPEC_KEY, None)
    media = {key: value for key, value in media.items() if value is not None}
    _check_one_each(media, batch.get("mm_token_type_ids"))
    chunks: dict[str, list[Any]] = {}
    if _IMAGES in media:
        chunks |= _image_chunks(media, batch_size, bounds)
    if _VIDEOS in media:
        chunks |= _video_chunks(media, batch_size, bounds)
    for key, value in further.items():
        sizes = list((owned or {})[key])
        # One entry for the whole batch (which adapters a model switches on) is that of every micro-batch.
        is_shared = len(value) == 1 < sum(sizes)
        chunks[key] = [value] * len(bounds) if is_shared else _cut_aligned(key, value, sizes, bounds)
    if chunks:
        batch[VLM_PP_MEDIA_KEY] = chunks if compact is None else chunks | {keys.PIXEL_SPEC_KEY: compact}
    return batch


def _check_one_each(media: dict[str, Any], types: Any) -> None:
    """Refuse media without counts where a row has none.

    Without counts, as many items as rows are taken for one each. If they are not, some row has none of them, and its
    token types say so.
    """
    for kind, pixels, counts in ((1, _IMAGES, keys.IMAGE_COUNTS_KEY), (2, _VIDEOS, keys.VIDEO_COUNTS_KEY)):
        if types is None or pixels not in media or counts in media or len(types) == 1:
            continue
        empty = [row for row, has in enumerate((types == kind).any(dim=1).tolist()) if not has]
        if empty:
            raise MediaCutError(
                f"VLM PP chunking cannot align {pixels} with {len(types)} samples: rows {empty} have no tokens for "
                f"them, so they are not one for each, and nothing says which sample owns which. Let the collate "
                f"function add {counts}."
            )


def _image_chunks(media: dict[str, Any], batch_size: int, bounds: Bounds) -> dict[str, list[Any]]:
    pixels, counts = media[_IMAGES], media.get(keys.IMAGE_COUNTS_KEY)
    grids = [key for key in keys.IMAGE_GRID_KEYS if key in media]
    step3 = {key: media[key] for key in keys.PATCH_KEYS if key in media}
    if not grids:
        chunks = chunk_step3_media(pixels, batch_size, len(bounds), **step3, n_images_per_sample=counts)
        num_images = len(pixels) if counts is None else sum(as_counts(counts))
    else:
        num_images = len(media[grids[0]])
        pixel_chunks, grid_chunks = chunk_vlm_media(pixels, media[grids[0]], batch_size, len(bounds), counts)
        chunks = {_IMAGES: pixel_chunks, grids[0]: grid_chunks, "image_grid_hws": grid_chunks}
        if step3:
            chunks |= chunk_crops(bounds, **step3)
    extras = [key for key in (*grids[1:], *keys.IMAGE_ROW_KEYS) if key in media]
    if extras:
        images = item_bounds(samples_own(num_images, batch_size, counts, "image"), bounds)
        chunks |= {key: _cut_aligned(key, media[key], [1] * num_images, images) for key in extras}
    return chunks


def _video_chunks(media: dict[str, Any], batch_size: int, bounds: Bounds) -> dict[str, list[Any]]:
    pixels, counts = media[_VIDEOS], media.get(keys.VIDEO_COUNTS_KEY)
    grids = [key for key in keys.VIDEO_GRID_KEYS if key in media]
    if grids:
        num_videos = len(media[grids[0]])
        proposals = [[1] * num_videos, patches_per_item(media[grids[0]])]
    elif "num_frames_per_video" in media:
        proposals = [as_counts(media["num_frames_per_video"])]
        num_videos = len(proposals[0])
    elif counts is not None and sum(as_counts(counts)) == len(pixels):
        num_videos = len(pixels)
        proposals = [[1] * num_videos]
    else:
        raise MediaCutError(
            f"pixel_values_videos has {len(pixels)} rows, and neither video_grid_thw nor num_frames_per_video nor "
            f"fitting n_videos_per_sample ({None if counts is None else as_counts(counts)}) says which video owns "
            f"which rows; the batch cannot be cut into micro-batches. Keep video_grid_thw in the batch."
        )
    rows = owned_rows(len(pixels), proposals, "video")
    videos = item_bounds(samples_own(num_videos, batch_size, counts, "video"), bounds)
    chunks = {_VIDEOS: cut_rows(pixels, rows, videos)}
    sizes = {key: [1] * num_videos for key in (*grids, *keys.VIDEO_ROW_KEYS)} | dict.fromkeys(
        keys.VIDEO_FRAME_KEYS, rows
    )
    return chunks | {key: _cut_aligned(key, media[key], own, videos) for key, own in sizes.items() if key in media}


def _cut_aligned(key: str, value: Any, sizes: list[int], bounds: Bounds) -> list[Any]:
    """Cut what goes along with pixels; item `i` has `sizes[i]` rows of it."""
    if len(value) != sum(sizes):
        raise MediaCutError(
            f"VLM PP chunking cannot align {key}, which has {len(value)} rows, with media that have {sum(sizes)}; its "
            f"rows would reach the wrong micro-batch. Emit one row for each."
        )
    return cut_rows(value, sizes, bounds)


def wrap_vlm_collate_for_pp(collate_fn: Callable[[Any], Any], n_microbatches: int) -> Callable[[Any], Any]:
    """Return a collate function whose batches leave with their media cut for a pipeline.

    Results that are no mapping, or that hold no media, pass as they are.
    """

    @wraps(collate_fn)
    def collate(examples: Any) -> Any:
        batch = collate_fn(examples)
        if not isinstance(batch, MutableMapping) or not any(key in batch for key in keys.MEDIA_KEYS):
            return batch
        ids = batch.get("input_ids")
        if not isinstance(ids, torch.Tensor):
            raise MediaCutError(
                f"The batch has media and no input_ids (keys: {', '.join(sorted(batch))}), so its number of rows is "
                f"not known and its media cannot be cut. Wrap a collate function that emits input_ids."
            )
        return prepare_vlm_media_for_pp(batch, ids.shape[0], n_microbatches)

    return collate


def pp_chunk_specs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chunk spec of every argument: rows are axis 0, and axis 1 of positions with several rows per token.

    By default torch cuts axis 0 of everything. Positions `[3 or 4, B, L]` would then be cut between height and width,
    and with a matching number of micro-batches no error would say so.
    """
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    def spec(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:  # a number, such as the labels of the step
            return _Replicate()
        return TensorChunkSpec(1 if name == keys.POSITIONS_KEY and value.ndim == 3 else 0)  # type: ignore[no-untyped-call]

    return {name: spec(name, value) for name, value in kwargs.items()}


def take_vlm_media(part: torch.nn.Module, names: Collection[str]) -> dict[str, Any]:
    """Return the media of the micro-batch that the first stage runs now, and move the cursor on.

    Args:
        part: The module on which `stage_vlm_media_for_pp` staged the media.
        names: The media arguments that its forward accepts, such as `pixel_values` and `image_grid_thw`.

    Returns:
        What there is under these names. A text-only micro-batch has nothing, and still moves the cursor.
    """
    chunks: dict[str, list[Any]] | None = getattr(part, _ALL_CHUNKS, None)
    if chunks is None:
        return {}
    index: int = getattr(part, _CURSOR)
    setattr(part, _CURSOR, index + 1)
    taken = {name: chunks[name][index] for name in names if name in chunks}
    return {name: value for name, value in taken.items() if len(value)}


@contextmanager
def stage_vlm_media_for_pp(
    pp: Any, model_parts: list[torch.nn.Module], batch: MutableMapping[str, Any]
) -> Iterator[None]:
    """Attach the media of a prepared batch to the first stage for one call of the schedule.

    Args:
        pp: The pipeline; `pp.info` says whether this rank `has_first_stage` and holds its `stages` or its `schedule`.
        model_parts: The modules of this rank's stages; the first part gets the media.
        batch: A batch of `prepare_vlm_media_for_pp`. The media are taken out of it on every rank. Compact pixels are
            finished micro-batch by micro-batch, when the forward reads them, for the device and dtype of the part.
    """
    chunks = batch.pop(VLM_PP_MEDIA_KEY, None)
    if not chunks or not pp.info.has_first_stage:
        yield
        return
    part = model_parts[0]
    if keys.PIXEL_SPEC_KEY in chunks:
        chunks = finish_pixels({VLM_PP_MEDIA_KEY: chunks}, *_home_of(part))[VLM_PP_MEDIA_KEY]
    staged = {
        f"_vlm_{key}_chunks": chunks.get(key)
        for pixels, names in zip(keys.PIXEL_KEYS, (_IMAGE_KEYS, _VIDEO_KEYS), strict=True)
        for key in names
        if pixels in chunks
    }
    for name, value in {**dict.fromkeys(_ATTRIBUTES), **staged, _CURSOR: 0, _ALL_CHUNKS: chunks}.items():
        setattr(part, name, value)
    try:
        with _cursor_follows(_first_stage(pp.info), part):
            yield
    finally:
        for name in _ATTRIBUTES:
            setattr(part, name, None)


def _home_of(part: torch.nn.Module) -> tuple[Any, Any]:
    """Return device and dtype of the part's weights."""
    weights = (weight for weight in part.parameters() if weight.is_floating_point())
    return next(((weight.device, weight.dtype) for weight in weights), (None, DEFAULT_DTYPE))


def _first_stage(info: Any) -> Any:
    """Return the first stage of this rank, from the list of stages or from the schedule that owns it."""
    schedule = getattr(info, "schedule", None)
    stages = getattr(info, "stages", None) or getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    return next((stage for stage in stages if getattr(stage, "is_first", False)), None)


@contextmanager
def _cursor_follows(stage: Any, part: torch.nn.Module) -> Iterator[None]:
    """Set the cursor to the number of each micro-batch before its forward; without a stage the forward counts alone."""
    run_chunk = getattr(stage, "forward_one_chunk", None)
    if run_chunk is None:
        yield
        return

    def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        setattr(part, _CURSOR, fwd_chunk_id)
        return run_chunk(fwd_chunk_id, *args, **kwargs)

    stage.forward_one_chunk = forward_one_chunk
    try:
        yield
    finally:
        del stage.forward_one_chunk
