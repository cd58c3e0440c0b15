"""Read a processor's config into counting rules: enters a processor object, leaves a `Geometry`.

Which rule a family follows is decided by the class of its processor; the numbers come from the object itself, also
where a processor class overrides what its parts say. Classes are known by name, so transformers is not imported.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from vlm_stream.errors import ConfigError
from vlm_stream.tokens.frames import FrameRule
from vlm_stream.tokens.geometry import Geometry
from vlm_stream.tokens.rules.audio import ChunkedAudio, ConvolvedMel, FilterBank, SubsampledMel, WindowedMel
from vlm_stream.tokens.rules.base import GUESSED_TOKENS
from vlm_stream.tokens.rules.budgets import BudgetedImage, NavitImage, NavitVideo, SoftBudget, TargetedVideo
from vlm_stream.tokens.rules.grids import ClipGrid, ClipGridImage, FrameGrid, PatchGrid
from vlm_stream.tokens.rules.pieces import (
    AnyresImage,
    FixedFrames,
    FixedImage,
    PaddedTiles,
    RowCrops,
    TileGrid,
    WindowCrops,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Processor", "read_family", "read_geometry"]

_log = logging.getLogger(__name__)

_VIT_PATCH: Final = 14
"""Pixels along a patch of the towers whose processors do not tell (InternViT, SigLIP so400m)."""
_DEFAULT_FPS: Final = 2.0
"""Processors without a rate of their own would take every frame of a file: 10 s of 720p would be 108,029 tokens."""
_DEFAULT_RATE: Final = 16000


class Processor(Protocol):
    """What is asked of every transformers processor, and of a bare tokenizer in its place."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batch of texts and media."""
        ...

    def apply_chat_template(self, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the text, or the batch, of a conversation."""
        ...


class _Part:
    """One part of a processor, seen as its processor will call it: class-wide defaults win over the part's config."""

    def __init__(self, processor: Any, name: str, modality: str) -> None:
        self._part = getattr(processor, name, None)
        declared = getattr(getattr(processor, "valid_processor_kwargs", None), "_defaults", None) or {}
        self._overrides = declared.get(modality, {})
        self._owner = f"{type(processor).__name__}.{name}"

    def read(self, name: str, default: Any = None) -> Any:
        """Return a setting; a present None reads as the default."""
        value = self._overrides.get(name)
        if value is None:
            value = getattr(self._part, name, None)
        return default if value is None else value

    def ints(self, **names: str) -> dict[str, int]:
        """Return whole numbers: fields of a rule, and the names of their settings."""
        return {field: int(self.read(name)) for field, name in names.items()}

    def read_size(self, *names: str) -> int:
        """Return the first of these keys that the part's `size` (a dict or an object) holds."""
        size = self.read("size")
        for name in names:
            value = size.get(name) if hasattr(size, "get") else getattr(size, name, None)
            if value:
                return int(value)
        raise ConfigError(
            f"{self._owner} has no {' or '.join(names)} in its size ({size!r}), so its tokens cannot be counted. "
            "Complete the processor's config."
        )


def _image_part(processor: Any) -> _Part:
    return _Part(processor, "image_processor", "images_kwargs")


def _video_part(processor: Any) -> _Part:
    return _Part(processor, "video_processor", "videos_kwargs")


def _audio_part(processor: Any, name: str = "feature_extractor") -> _Part:
    return _Part(processor, name, "audio_kwargs")


def _read_frame_rule(part: _Part, temporal_patch_size: int, max_frames: int | None = None) -> FrameRule:
    """Return which frames are read, as far as the config says."""
    most = max_frames or part.read("max_frames", 768)
    return FrameRule(
        fps=float(part.read("fps", _DEFAULT_FPS)),
        min_frames=min(int(part.read("min_frames", 4)), int(most)),
        max_frames=int(most),
        temporal_patch_size=temporal_patch_size,
    )


def _read_pixel_limits(part: _Part) -> dict[str, int]:
    """Return the limits of a Qwen-like part; old versions keep them as attributes beside `size`."""
    return {
        "min_pixels": int(part.read("min_pixels") or part.read_size("min_pixels", "shortest_edge")),
        "max_pixels": int(part.read("max_pixels") or part.read_size("max_pixels", "longest_edge")),
    }


def _read_grid(part: _Part) -> dict[str, int]:
    return part.ints(patch_size="patch_size", merge_size="merge_size")


def _read_cap(part: _Part) -> int | None:
    """Return the tokens that frames must share, if the cap of Qwen's video processors is on."""
    return int(part.read("max_video_tokens")) if part.read("cap_pixels_per_frame") else None


def _read_qwen2(processor: Any, family: str) -> Geometry:
    return _read_qwen(processor, family, FrameGrid)


def _read_qwen3(processor: Any, family: str) -> Geometry:
    return _read_qwen(processor, family, ClipGrid)


def _read_qwen(processor: Any, family: str, video_rule: type[FrameGrid | ClipGrid]) -> Geometry:
    image, video = _image_part(processor), _video_part(processor)
    temporal = int(video.read("temporal_patch_size"))
    clips = video_rule(
        **_read_grid(video), **_read_pixel_limits(video), temporal_patch_size=temporal, capped_tokens=_read_cap(video)
    )
    images = PatchGrid(**_read_grid(image), **_read_pixel_limits(image))
    return Geometry(family=family, image=images, video=clips, frames=_read_frame_rule(video, temporal))


def _read_qwen3_omni(processor: Any, family: str) -> Geometry:
    audio = _audio_part(processor)
    hearing = WindowedMel(
        sampling_rate=int(audio.read("sampling_rate", _DEFAULT_RATE)),
        hop_length=int(audio.read("hop_length", 160)),
        window_frames=2 * int(audio.read("n_window", 50)),
    )
    return replace(_read_qwen2(processor, family), audio=hearing)


def _read_glm46v(processor: Any, family: str) -> Geometry:
    image, video = _image_part(processor), _video_part(processor)
    temporal = int(video.read("temporal_patch_size"))
    image_temporal = int(image.read("temporal_patch_size"))
    return Geometry(
        family=family,
        image=ClipGridImage(**_read_grid(image), **_read_pixel_limits(image), temporal_patch_size=image_temporal),
        video=ClipGrid(**_read_grid(video), **_read_pixel_limits(video), temporal_patch_size=temporal),
        frames=_read_frame_rule(video, temporal, max_frames=640),  # the most that its own sampler takes
    )


def _read_kimi(processor: Any, family: str) -> Geometry:
    image, video = _image_part(processor), _video_part(processor)

    def limits(part: _Part) -> dict[str, int]:
        return {"max_patches": int(part.read("max_patches")), "max_side_patches": part.read_size("max_height")}

    if getattr(processor, "video_processor", None) is None:  # the published remote code
        return Geometry(family=family, image=NavitImage(**_read_grid(image), **limits(image)))
    temporal = int(video.read("temporal_patch_size"))
    return Geometry(
        family=family,
        image=NavitImage(**_read_grid(image), **limits(image)),
        video=NavitVideo(**_read_grid(video), **limits(video), temporal_patch_size=temporal),
        frames=_read_frame_rule(video, temporal),
    )


def _read_gemma3(processor: Any, family: str) -> Geometry:
    image = _image_part(processor)
    crops: dict[str, Any] = {}
    if image.read("do_pan_and_scan"):
        crops |= image.ints(max_crops="pan_and_scan_max_num_crops", min_crop_size="pan_and_scan_min_crop_size")
        crops["min_ratio"] = float(image.read("pan_and_scan_min_ratio_to_activate"))
    patches = (image.read_size("height") // _VIT_PATCH) * (image.read_size("width") // _VIT_PATCH)
    rule = FixedImage(tokens_per_view=int(processor.image_seq_length), patches_per_view=patches, **crops)
    return Geometry(family=family, image=rule)


def _read_gemma4(processor: Any, family: str) -> Geometry:
    image, video, audio = _image_part(processor), _video_part(processor), _audio_part(processor)

    def budget(part: _Part) -> SoftBudget:
        return SoftBudget(
            **part.ints(patch_size="patch_size", pooling_size="pooling_kernel_size", max_tokens="max_soft_tokens")
        )

    rate = int(audio.read("sampling_rate", _DEFAULT_RATE))
    hearing: ChunkedAudio | ConvolvedMel
    if family == "gemma4_unified":
        hearing = ChunkedAudio(sampling_rate=rate, samples_per_token=int(audio.read("audio_samples_per_token")))
    else:
        hearing = ConvolvedMel(sampling_rate=rate, **audio.ints(hop_length="hop_length", frame_length="frame_length"))
    return Geometry(
        family=family,
        image=budget(image),
        video=budget(video),
        audio=hearing,
        frames=_read_frame_rule(video, 1, max_frames=int(video.read("num_frames", 32))),
    )


def _read_internvl(processor: Any, family: str) -> Geometry:
    image, video = _image_part(processor), _video_part(processor)
    tile = image.read_size("height")
    tokens = int(processor.image_seq_length)
    patches = (tile // _VIT_PATCH) ** 2
    cuts = bool(image.read("crop_to_patches"))
    rule = TileGrid(
        tile_size=tile,
        min_tiles=int(image.read("min_patches", 1)) if cuts else 1,
        max_tiles=int(image.read("max_patches", 12)) if cuts else 1,
        tokens_per_tile=tokens,
        patches_per_tile=patches,
    )
    clip = FixedFrames(tokens_per_frame=tokens, patches_per_frame=patches)
    return Geometry(family=family, image=rule, video=clip, frames=_read_frame_rule(video, 1))


def _read_llava_onevision(processor: Any, family: str) -> Geometry:
    image, video = _image_part(processor), _video_part(processor)
    tokens = int(processor.num_image_tokens)
    side = math.ceil(int(math.sqrt(tokens)) / 2)
    limit = str(processor.vision_aspect_ratio).removeprefix("anyres_max_")
    rule = AnyresImage(
        pinpoints=tuple((int(high), int(wide)) for high, wide in image.read("image_grid_pinpoints")),
        tile_size=image.read_size("height", "shortest_edge"),
        tokens_per_tile=tokens,
        max_tiles=int(limit),
        dropped_tokens=int(processor.vision_feature_select_strategy == "default"),
    )
    clip = FixedFrames(tokens_per_frame=side * side, patches_per_frame=tokens, tokens_per_video=1)
    return Geometry(family=family, image=rule, video=clip, frames=_read_frame_rule(video, 1))


def _read_smolvlm(processor: Any, family: str) -> Geometry:
    image, video = _image_part(processor), _video_part(processor)
    crop = int(image.read("max_image_size")["longest_edge"])
    tokens = int(processor.image_seq_len)
    patches = tokens * max(1, round((crop / _VIT_PATCH) ** 2 / tokens))
    rule = RowCrops(
        crop_size=crop,
        longest_side=image.read_size("longest_edge"),
        tokens_per_crop=tokens,
        patches_per_crop=patches,
        splits=bool(image.read("do_image_splitting")),
    )
    clip = FixedFrames(tokens_per_frame=tokens, patches_per_frame=patches)
    frames = _read_frame_rule(video, 1, max_frames=int(video.read("num_frames", 64)))
    return Geometry(family=family, image=rule, video=clip, frames=frames)


def _read_step3p7(processor: Any, family: str) -> Geometry:
    image = _image_part(processor)
    view, window, patch = image.read_size("height"), int(image.read("patch_size")), int(image.read("vision_patch_size"))
    rule = WindowCrops(
        view_size=view,
        window_size=window,
        largest_side=int(image.read("max_image_size")),
        tokens_per_view=int(processor.num_image_feature_size),
        tokens_per_window=int(processor.num_patch_feature_size),
        patches_per_view=(view // patch) ** 2,
        patches_per_window=(window // patch) ** 2,
    )
    return Geometry(family=family, image=rule)


def _read_phi4(processor: Any, family: str) -> Geometry:
    image, audio = _image_part(processor), _audio_part(processor, "audio_processor")
    tile = image.read_size("height")
    seeing = PaddedTiles(tile_size=tile, **image.ints(patch_size="patch_size", max_tiles="dynamic_hd"))
    hearing = FilterBank(
        sampling_rate=int(audio.read("sampling_rate", _DEFAULT_RATE)),
        **audio.ints(hop_length="hop_length", frame_length="win_length", feature_stride="audio_feat_stride"),
        **audio.ints(compression="audio_compression_rate", downsampling="audio_downsample_rate"),
    )
    return Geometry(family=family, image=seeing, audio=hearing)


def _read_nemotron(processor: Any, family: str) -> Geometry:
    image, video = _image_part(processor), _video_part(processor)
    temporal = int(processor.video_temporal_patch_dim)
    seeing = BudgetedImage(
        patch_size=int(image.read("patch_size")),
        merge_size=round(1 / image.read("downsample_ratio")),
        min_patches=int(image.read("min_num_patches")),
        max_patches=int(image.read("max_num_patches", 0)),
        context_tokens=int(image.read("max_model_len")),
    )
    clip = TargetedVideo(
        merge_size=round(1 / video.read("downsample_ratio")),
        target_patches=int(video.read("video_target_num_patches")),
        keep_shape=bool(video.read("video_maintain_aspect_ratio")),
        temporal_patch_size=temporal,
    )
    hearing = SubsampledMel(
        sampling_rate=int(processor.audio_sampling_rate),
        hop_length=int(processor.audio_hop_length),
        num_convolutions=int(math.log2(processor.audio_subsampling_factor)),
    )
    return Geometry(family=family, image=seeing, video=clip, audio=hearing, frames=_read_frame_rule(video, temporal))


_FAMILIES: Final[dict[str, tuple[str, Callable[[Any, str], Geometry]]]] = {
    "Gemma3Processor": ("gemma3", _read_gemma3),
    "Gemma4Processor": ("gemma4", _read_gemma4),
    "Gemma4UnifiedProcessor": ("gemma4_unified", _read_gemma4),
    "Glm46VProcessor": ("glm46v", _read_glm46v),
    "InternVLProcessor": ("internvl", _read_internvl),
    "KimiK25Processor": ("kimi_k25", _read_kimi),
    "Kimi_K25Processor": ("kimi_k25", _read_kimi),
    "LlavaOnevisionProcessor": ("llava_onevision", _read_llava_onevision),
    "NemotronH_Omni_Reasoning_V3Processor": ("nemotron_h_omni", _read_nemotron),
    "Phi4MultimodalProcessor": ("phi4_multimodal", _read_phi4),
    "Qwen2VLProcessor": ("qwen2_vl", _read_qwen2),
    "Qwen2_5_VLProcessor": ("qwen2_5_vl", _read_qwen2),
    "Qwen3OmniMoeProcessor": ("qwen3_omni_moe", _read_qwen3_omni),
    "Qwen3VLProcessor": ("qwen3_vl", _read_qwen3),
    "SmolVLMProcessor": ("smolvlm", _read_smolvlm),
    "Step3p7Processor": ("step3p7", _read_step3p7),
}


def _find_reader(processor: Processor) -> tuple[str, Callable[[Any, str], Geometry]] | None:
    return next((_FAMILIES[kind.__name__] for kind in type(processor).__mro__ if kind.__name__ in _FAMILIES), None)


def read_family(processor: Processor) -> str:
    """Return the family of a processor: "text" for a bare tokenizer, "unknown" for a class that is not known here."""
    found = _find_reader(processor)
    if found is not None:
        return found[0]
    return "unknown" if hasattr(processor, "tokenizer") else "text"


def read_geometry(processor: Processor) -> Geometry:
    """Read the rules of a processor; a guess, and a line in the log, where its class is not known."""
    found = _find_reader(processor)
    if found is not None:
        family, read = found
        return read(processor, family)
    if read_family(processor) == "text":
        return Geometry(family="text")
    _log.warning(
        "No counting rule is known for %s: every medium is taken for %d tokens, and lengths are estimates. Known: %s.",
        type(processor).__name__,
        GUESSED_TOKENS,
        ", ".join(sorted(_FAMILIES)),
    )
    return Geometry.unknown()
