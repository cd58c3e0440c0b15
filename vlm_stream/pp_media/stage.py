"""One call of the schedule: chunks on the first stage, and along which axis torch cuts the tensors that stay.

Enters: the pipeline, its model parts, a prepared batch. Leaves: attributes on the first part that its forward reads,
removed when the call ends. Knows nothing of what the chunks hold.

The forward of the first stage does not learn from torch which micro-batch it runs, so a cursor on the module tells it.
Before each micro-batch the cursor is set to that micro-batch's number, whatever happened before: neither a text-only
micro-batch whose forward read nothing, nor the forward with which a schedule infers shapes, moves the media of others.
"""

from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from vlm_stream.keys import PIXEL_KEYS, PIXEL_SPEC_KEY, POSITIONS_KEY
from vlm_stream.pixels import DEFAULT_DTYPE, finish_pixels
from vlm_stream.pp_media.prepare import VLM_PP_MEDIA_KEY

_CURSOR: Final = "_vlm_chunk_idx"
_ALL_CHUNKS: Final = "_vlm_media_chunks"
_IMAGE_KEYS: Final = ("pixel_values", "image_grid_hws", "num_patches", "patch_pixel_values", "patch_newline_mask")
_VIDEO_KEYS: Final = ("pixel_values_videos", "video_grid_thw")
_ATTRIBUTES: Final = (*(f"_vlm_{key}_chunks" for key in (*_IMAGE_KEYS, *_VIDEO_KEYS)), _CURSOR, _ALL_CHUNKS)


def pp_chunk_specs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chunk spec of every argument: rows are axis 0, and axis 1 of positions with several rows per token.

    By default torch cuts axis 0 of everything. Positions `[3 or 4, B, L]` would then be cut between height and width,
    and with a matching number of micro-batches no error would say so.
    """
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    def spec(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:  # a number, such as the labels of the step
            return _Replicate()
        return TensorChunkSpec(1 if name == POSITIONS_KEY and value.ndim == 3 else 0)  # type: ignore[no-untyped-call]

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
    if PIXEL_SPEC_KEY in chunks:
        chunks = finish_pixels({VLM_PP_MEDIA_KEY: chunks}, *_home_of(part))[VLM_PP_MEDIA_KEY]
    staged = {
        f"_vlm_{key}_chunks": chunks.get(key)
        for pixels, keys in zip(PIXEL_KEYS, (_IMAGE_KEYS, _VIDEO_KEYS), strict=True)
        for key in keys
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
