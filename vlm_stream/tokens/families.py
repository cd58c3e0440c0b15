"""Read a processor's config into counting rules: enters a processor object, leaves a `Geometry`.

Which rule a family follows is decided by the class of its processor; the numbers come from the object itself, also
where a processor class overrides what its parts say. Classes are known by name, so transformers is not imported.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

from vlm_stream.tokens.chat import PARTS, Part, Processor
from vlm_stream.tokens.geometry import Geometry
from vlm_stream.tokens.measure import COMMON_RULES, ask
from vlm_stream.tokens.media import FrameRule
from vlm_stream.tokens.rules import audio, budgets, grids, pieces

_log = logging.getLogger(__name__)

_VIT_PATCH: Final = 14  # pixels along a patch of the towers whose processors do not tell (InternViT, SigLIP so400m)
_NAMED_CROPS: Final = 6  # rows and columns of crops for which tokenizers of SmolVLM and Idefics3 have tokens
_DEFAULT_FPS: Final = 2.0
"""Processors without a rate of their own would take every frame of a file: 10 s of 720p would be 108,029 tokens."""


Reader: TypeAlias = Callable[[Any, Part], Any]


class _Family(NamedTuple):
    """How one family's rules are read: each of a processor and the part of it that is for the medium."""

    name: str
    image: Reader | None = None
    video: Reader | None = None
    audio: Reader | None = None
    temporal: Callable[[Any, Part], int] = lambda _, part: int(part.read("temporal_patch_size", 1))
    """Frames that become one layer of tokens."""
    max_frames: Callable[[Part], int | None] = lambda _: None
    """The most frames that its own sampler takes, where that is not `max_frames`."""


def _read_video_grid(rule: type[grids.FrameGrid | grids.ClipGrid]) -> Reader:
    return lambda _, part: rule(**part.grid(), **part.ints("temporal_patch_size"), capped_tokens=part.cap())


def _read_whisper(_: Any, part: Part) -> audio.WindowedMel:
    window = 2 * int(part.read("n_window", 50))
    return audio.WindowedMel(**part.rate(), hop_length=int(part.read("hop_length", 160)), window_frames=window)


def _read_navit(_: Any, part: Part) -> budgets.Navit:
    return budgets.Navit(
        **part.ints("patch_size", "merge_size", "max_patches"),
        max_side_patches=part.read_size("max_height"),
    )


def _read_navit_video(processor: Any, part: Part) -> budgets.Navit:
    return replace(_read_navit(processor, part), temporal_patch_size=part.whole("temporal_patch_size"))


def _read_siglip(processor: Any, part: Part) -> pieces.FixedFrames:
    patches = (part.read_size("height") // _VIT_PATCH) * (part.read_size("width") // _VIT_PATCH)
    return pieces.FixedFrames(tokens_per_frame=int(processor.image_seq_length), patches_per_frame=patches)


def _read_gemma3_image(processor: Any, part: Part) -> pieces.FixedFrames:
    if part.read("do_pan_and_scan"):  # its class says no, whatever the config of the part says
        raise TypeError("it adds crops to images")
    return _read_siglip(processor, part)


def _read_soft_budget(_: Any, part: Part) -> budgets.SoftBudget:
    return budgets.SoftBudget(
        **part.ints("patch_size", pooling_size="pooling_kernel_size", max_tokens="max_soft_tokens")
    )


def _read_internvl_image(processor: Any, part: Part) -> pieces.TileGrid:
    tile, cuts = part.read_size("height"), bool(part.read("crop_to_patches"))
    return pieces.TileGrid(
        tile_size=tile,
        min_tiles=int(part.read("min_patches", 1)) if cuts else 1,
        max_tiles=int(part.read("max_patches", 12)) if cuts else 1,
        tokens_per_tile=int(processor.image_seq_length),
        patches_per_tile=(tile // _VIT_PATCH) ** 2,
    )


def _read_internvl_video(processor: Any, _: Part) -> pieces.FixedFrames:
    patches = (Part(processor, "image").read_size("height") // _VIT_PATCH) ** 2
    return pieces.FixedFrames(tokens_per_frame=int(processor.image_seq_length), patches_per_frame=patches)


def _read_anyres(processor: Any, part: Part) -> pieces.AnyresImage:
    return pieces.AnyresImage(
        pinpoints=tuple((int(high), int(wide)) for high, wide in part.read("image_grid_pinpoints")),
        tile_size=part.read_size("height", "shortest_edge"),
        tokens_per_tile=int(processor.num_image_tokens),
        max_tiles=int(str(processor.vision_aspect_ratio).removeprefix("anyres_max_")),
        dropped_tokens=int(processor.vision_feature_select_strategy == "default"),
    )


def _read_llava_next(processor: Any, part: Part) -> pieces.AnyresImage:
    crop = dict(part.read("crop_size"))
    if not part.read("do_center_crop") or crop["height"] != crop["width"]:
        raise TypeError("its tiles are not cropped to squares")
    drops = processor.vision_feature_select_strategy == "default"
    return pieces.AnyresImage(
        pinpoints=tuple((int(high), int(wide)) for high, wide in part.read("image_grid_pinpoints")),
        tile_size=int(crop["height"]),
        tokens_per_tile=(int(crop["height"]) // int(processor.patch_size)) ** 2,
        max_tiles=0,
        dropped_tokens=int(drops) - int(processor.num_additional_image_tokens),
        cuts_all=True,
    )


def _read_llama4(processor: Any, part: Part) -> pieces.CanvasTiles:
    tile = part.read_size("height")
    patches = (tile // int(processor.patch_size)) ** 2
    return pieces.CanvasTiles(
        tile_size=tile,
        max_tiles=part.whole("max_patches"),
        tokens_per_tile=patches // int(processor.downsample_ratio),
        patches_per_tile=patches,
        takes_largest=bool(part.read("resize_to_max_canvas")),
    )


def _read_paligemma(processor: Any, part: Part) -> pieces.FixedFrames:
    if processor.image_token != "<image>":  # noqa: S105 - not a password
        raise TypeError("it puts images before all text, because its image token is not '<image>'")
    return _read_siglip(processor, part)


def _read_pooled_frames(processor: Any, _: Part) -> pieces.FixedFrames:
    tokens = int(processor.num_image_tokens)
    side = math.ceil(int(math.sqrt(tokens)) / 2)
    return pieces.FixedFrames(tokens_per_frame=side * side, patches_per_frame=tokens, tokens_per_video=1)


def _smolvlm_crop(processor: Any) -> dict[str, int]:
    """Return tokens and patches of a crop, which is also what a frame is."""
    crop, tokens = int(Part(processor, "image").read("max_image_size")["longest_edge"]), int(processor.image_seq_len)
    return {"crop": crop, "tokens": tokens, "patches": tokens * max(1, round((crop / _VIT_PATCH) ** 2 / tokens))}


def _read_row_crops(processor: Any, part: Part) -> pieces.RowCrops:
    crop, longest = _smolvlm_crop(processor), part.read_size("longest_edge")
    if not part.read("do_resize", True) or longest > _NAMED_CROPS * crop["crop"]:
        raise TypeError("it does not scale images, or has no tokens for all its rows of crops")
    return pieces.RowCrops(
        crop_size=crop["crop"],
        longest_side=longest,
        tokens_per_crop=crop["tokens"],
        patches_per_crop=crop["patches"],
        splits=bool(part.read("do_image_splitting")),
    )


def _read_smolvlm_video(processor: Any, _: Part) -> pieces.FixedFrames:
    crop = _smolvlm_crop(processor)
    return pieces.FixedFrames(tokens_per_frame=crop["tokens"], patches_per_frame=crop["patches"])


def _read_phi4_image(_: Any, part: Part) -> pieces.PaddedTiles:
    return pieces.PaddedTiles(tile_size=part.read_size("height"), **part.ints("patch_size", max_tiles="dynamic_hd"))


def _read_phi4_audio(_: Any, part: Part) -> audio.FilterBank:
    return audio.FilterBank(
        **part.rate(),
        **part.ints("hop_length", frame_length="win_length", feature_stride="audio_feat_stride"),
        **part.ints(compression="audio_compression_rate", downsampling="audio_downsample_rate"),
    )


def _read_nemotron_image(_: Any, part: Part) -> budgets.BudgetedImage:
    return budgets.BudgetedImage(
        **part.ints("patch_size", min_patches="min_num_patches", context_tokens="max_model_len"),
        merge_size=round(1 / part.read("downsample_ratio")),
        max_patches=int(part.read("max_num_patches", 0)),
    )


def _read_nemotron_video(processor: Any, part: Part) -> budgets.TargetedVideo:
    return budgets.TargetedVideo(
        merge_size=round(1 / part.read("downsample_ratio")),
        target_patches=part.whole("video_target_num_patches"),
        keep_shape=bool(part.read("video_maintain_aspect_ratio")),
        temporal_patch_size=int(processor.video_temporal_patch_dim),
    )


def _read_nemotron_audio(processor: Any, _: Part) -> audio.SubsampledMel:
    return audio.SubsampledMel(
        sampling_rate=int(processor.audio_sampling_rate),
        hop_length=int(processor.audio_hop_length),
        num_convolutions=int(math.log2(processor.audio_subsampling_factor)),
    )


def _read_pixtral(processor: Any, part: Part) -> pieces.RowGrid:
    return pieces.RowGrid(
        patch_size=int(processor.patch_size),
        merge_size=int(processor.spatial_merge_size),
        longest_side=part.read_size("longest_edge"),
    )


def _read_gemma3n_image(processor: Any, _: Part) -> pieces.FixedFrames:
    tokens = int(processor.image_seq_length)
    return pieces.FixedFrames(tokens_per_frame=tokens, patches_per_frame=tokens)


_QWEN_IMAGE: Final[Reader] = lambda _, part: grids.PatchGrid(**part.grid())  # noqa: E731
_QWEN2: Final = _Family("qwen2_vl", _QWEN_IMAGE, _read_video_grid(grids.FrameGrid))
_GEMMA4: Final = _Family(
    "gemma4",
    _read_soft_budget,
    _read_soft_budget,
    lambda _, part: audio.ConvolvedMel(**part.rate(), **part.ints("hop_length", "frame_length")),
    max_frames=lambda part: int(part.read("num_frames", 32)),
)
_KIMI: Final = _Family("kimi_k25", _read_navit, _read_navit_video)
_FAMILIES: Final[dict[str, _Family]] = {
    "Gemma3Processor": _Family("gemma3", _read_gemma3_image),
    "Gemma3nProcessor": _Family(
        "gemma3n",
        _read_gemma3n_image,
        audio=lambda processor, part: audio.FixedSound(**part.rate(), tokens=int(processor.audio_seq_length)),
    ),
    "Gemma4Processor": _GEMMA4,
    "Gemma4UnifiedProcessor": _GEMMA4._replace(
        name="gemma4_unified",
        audio=lambda _, part: audio.ChunkedAudio(
            **part.rate(), samples_per_token=part.whole("audio_samples_per_token")
        ),
    ),
    "Glm46VProcessor": _Family(
        "glm46v",
        lambda _, part: grids.ClipGrid(**part.grid(), **part.ints("temporal_patch_size")),
        _read_video_grid(grids.ClipGrid),
        max_frames=lambda _: 640,
    ),
    "Idefics3Processor": _Family("idefics3", _read_row_crops),
    "InternVLProcessor": _Family("internvl", _read_internvl_image, _read_internvl_video),
    "KimiK25Processor": _KIMI,
    "Kimi_K25Processor": _KIMI,
    "Llama4Processor": _Family("llama4", _read_llama4),
    "LlavaNextProcessor": _Family("llava_next", _read_llava_next),
    "LlavaOnevisionProcessor": _Family("llava_onevision", _read_anyres, _read_pooled_frames),
    "NemotronH_Omni_Reasoning_V3Processor": _Family(
        "nemotron_h_omni",
        _read_nemotron_image,
        _read_nemotron_video,
        _read_nemotron_audio,
        temporal=lambda processor, _: int(processor.video_temporal_patch_dim),
    ),
    # An encoder reads the page; the one token stands for a placeholder that its text does not have.
    "NemotronParseProcessor": _Family(
        "nemotron_parse", lambda *_: pieces.FixedFrames(tokens_per_frame=1, patches_per_frame=4096)
    ),
    "PaliGemmaProcessor": _Family("paligemma", _read_paligemma),
    "Phi4MultimodalProcessor": _Family("phi4_multimodal", _read_phi4_image, audio=_read_phi4_audio),
    "PixtralProcessor": _Family("pixtral", _read_pixtral),
    "Qwen2VLProcessor": _QWEN2,
    "Qwen2_5OmniProcessor": _QWEN2._replace(
        name="qwen2_5_omni",
        audio=lambda _, part: audio.PooledMel(**part.rate(), **part.ints("hop_length", max_samples="n_samples")),
    ),
    "Qwen2_5_VLProcessor": _QWEN2._replace(name="qwen2_5_vl"),
    "Qwen3OmniMoeProcessor": _QWEN2._replace(name="qwen3_omni_moe", audio=_read_whisper),
    "Qwen3VLProcessor": _Family("qwen3_vl", _QWEN_IMAGE, _read_video_grid(grids.ClipGrid)),
    "SmolVLMProcessor": _Family(
        "smolvlm", _read_row_crops, _read_smolvlm_video, max_frames=lambda part: int(part.read("num_frames", 64))
    ),
}


def _find_family(processor: Processor) -> _Family | None:
    return next((_FAMILIES[kind.__name__] for kind in type(processor).__mro__ if kind.__name__ in _FAMILIES), None)


def read_family(processor: Processor) -> str:
    """Return the family of a processor: "text" for a bare tokenizer, "unknown" for a class that is not known here."""
    found = _find_family(processor)
    if found is not None:
        return found.name
    return "unknown" if hasattr(processor, "tokenizer") else "text"


def _read_frame_rule(part: Part, temporal_patch_size: int, max_frames: int | None = None) -> FrameRule:
    """Return which frames are read, as far as the config says."""
    most = int(max_frames or part.read("max_frames", 768))
    return FrameRule(
        fps=float(part.read("fps", _DEFAULT_FPS)),
        min_frames=min(int(part.read("min_frames", 4)), most),
        max_frames=most,
        temporal_patch_size=temporal_patch_size,
    )


def read_geometry(processor: Processor) -> Geometry:
    """Read the rules of a processor; one whose class or config is not known is asked."""
    if read_family(processor) == "text":
        return Geometry(family="text")
    family, name = _find_family(processor), type(processor).__name__
    parts = {medium: Part(processor, medium) for medium in PARTS}
    video = parts["video"]
    if family is not None:
        try:
            readers = {medium: read for medium in parts if (read := getattr(family, medium)) is not None}
            rules = {medium: read(processor, parts[medium]) for medium, read in readers.items() if parts[medium].exists}
            rules["frames"] = FrameRule()
            if "video" in rules:
                rules["frames"] = _read_frame_rule(video, family.temporal(processor, video), family.max_frames(video))
            return Geometry(family=family.name, **rules)
        except (AttributeError, KeyError, TypeError) as error:
            _log.warning("%s has another config than its family (%s), so its media are measured.", name, error)
    asker, measured = ask(processor)
    common = {medium: rule for medium, rule in COMMON_RULES.items() if parts[medium].exists}
    layer, most = video.read("temporal_patch_size", 1), video.read("num_frames")
    frames = _read_frame_rule(video, int(layer), int(most) if most else None) if video.exists else FrameRule()
    return Geometry(family=name, **{**common, **measured}, frames=frames, is_exact=asker is not None)
