"""Images and frames scaled into a budget of patches or tokens: Kimi-K2.5, Gemma-4, Nemotron-H-Omni."""

from dataclasses import dataclass

import numpy as np

from vlm_stream.tokens.rules import Floats, Ints, MediaCounts, TakesAnySize


@dataclass(frozen=True, slots=True, kw_only=True)
class Navit(TakesAnySize):
    """Images and frames of Kimi-K2.5: never enlarged, scaled down to a patch limit, padded to whole tokens."""

    patch_size: int = 14
    merge_size: int = 2  # patches along the square that becomes one token
    max_patches: int = 16384  # most patches of an image or frame
    max_side_patches: int = 512  # most patches along a side
    temporal_patch_size: int = 1  # frames in a chunk

    def _count_patches(self, heights: Ints, widths: Ints) -> Ints:
        patch, longest = self.patch_size, self.max_side_patches * self.patch_size
        h, w = np.maximum(heights, 1).astype(np.float64), np.maximum(widths, 1).astype(np.float64)
        current = np.maximum(1.0, heights // patch) * np.maximum(1.0, widths // patch)
        scale = np.minimum(np.minimum(1.0, np.sqrt(self.max_patches / current)), np.minimum(longest / h, longest / w))
        sides = [np.minimum(np.maximum(1, np.trunc(side * scale)), longest).astype(np.int64) for side in (h, w)]
        factor = self.merge_size * patch
        high, wide = (-(-side // factor) * factor // patch for side in sides)
        patches: Ints = high * wide
        return patches

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        return self.count_videos(np.ones_like(heights), heights, widths)

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        """Count clips, chunk by chunk: each costs the tokens of one frame."""
        patches = self._count_patches(heights, widths)
        chunks = -(-frames // self.temporal_patch_size)
        tokens = chunks * (patches // self.merge_size**2)
        return MediaCounts(tokens, frames * patches, frames * patches.astype(np.float64) ** 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftBudget(TakesAnySize):
    """Images and frames of Gemma-4: as large as a budget of soft tokens allows, shape kept."""

    patch_size: int = 16
    pooling_size: int = 3  # patches along the square that becomes one token
    max_tokens: int = 280  # the budget of an image or a frame

    def _count_tokens(self, heights: Ints, widths: Ints) -> Ints:
        step = self.pooling_size * self.patch_size
        h, w = np.maximum(heights, 1).astype(np.float64), np.maximum(widths, 1).astype(np.float64)
        scale = np.sqrt((self.max_tokens * self.pooling_size**2 * self.patch_size**2) / (h * w))
        high, wide = np.floor(scale * h / step), np.floor(scale * w / step)
        # a side that rounds to nothing becomes one token wide; the other then follows the shape of the image.
        long_wide, long_high = (np.minimum(np.floor(ratio), self.max_tokens) for ratio in (w / h, h / w))
        high, wide = (
            np.where(high == 0, 1, np.where(wide == 0, long_high, high)),
            np.where(high == 0, long_wide, np.where(wide == 0, 1, wide)),
        )
        tokens: Ints = (high * wide).astype(np.int64)
        return tokens

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        return self.count_videos(np.ones_like(heights), heights, widths)

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        """Count clips, frame by frame."""
        tokens = self._count_tokens(heights, widths)
        patches = tokens * self.pooling_size**2
        return MediaCounts(frames * tokens, frames * patches, frames * patches.astype(np.float64) ** 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetedImage(TakesAnySize):
    """Images of Nemotron-H-Omni: near their own patch grid, scaled into the limits."""

    patch_size: int = 16
    merge_size: int = 2  # patches along the square that becomes one token
    min_patches: int = 1024
    max_patches: int = 13312  # most patches; 0: no limit but the context
    context_tokens: int = 16384  # length of the model's context, which all images of a call may fill

    def count_images(self, heights: Ints, widths: Ints, siblings: Ints) -> MediaCounts:
        most = np.maximum((self.context_tokens - 4) * self.merge_size**2, self.min_patches * siblings)
        if self.max_patches:
            most = np.minimum(most, self.max_patches)
        most = np.maximum(most, self.min_patches).astype(np.float64)
        high, wide = np.rint(heights / self.patch_size + 0.5), np.rint(widths / self.patch_size + 0.5)
        shrink = np.minimum(np.sqrt(most / np.maximum(high * wide, 1)), 1.0)
        high, wide = np.floor(shrink * high), np.floor(shrink * wide)
        grow = np.sqrt(self.min_patches / np.maximum(high * wide, 1))
        is_small = (most > self.min_patches) & (high * wide < self.min_patches)
        high, wide = np.where(is_small, np.ceil(grow * high), high), np.where(is_small, np.ceil(grow * wide), wide)
        high = self._to_whole_tokens(high, wide, most)
        wide = self._to_whole_tokens(wide, high, most)
        patches = (high * wide).astype(np.int64)
        return MediaCounts(patches // self.merge_size**2, patches, patches.astype(np.float64) ** 2)

    def _to_whole_tokens(self, side: Floats, other: Floats, most: Floats) -> Floats:
        """Round a side up to whole tokens where the budget allows it, else down."""
        surplus = side % self.merge_size
        raised = side + self.merge_size - surplus
        lowered = np.maximum(self.merge_size, side - surplus)
        return np.where(surplus == 0, side, np.where(raised * other <= most, raised, lowered))


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetedVideo(TakesAnySize):
    """Videos of Nemotron-H-Omni: frames near one number of patches; a few become one layer of tokens."""

    merge_size: int = 2  # patches along the square that becomes one token
    target_patches: int = 1024  # patches of a frame, about
    keep_shape: bool = True  # whether frames keep their shape or become squares
    temporal_patch_size: int = 2  # frames in a layer

    def count_videos(self, frames: Ints, heights: Ints, widths: Ints) -> MediaCounts:
        patches = self._count_patches(heights, widths)
        layers = -(-frames // self.temporal_patch_size)
        tokens = layers * (patches // self.merge_size**2)
        return MediaCounts(tokens, frames * patches, frames * patches.astype(np.float64) ** 2)

    def _count_patches(self, heights: Ints, widths: Ints) -> Ints:
        merge, target = self.merge_size, self.target_patches
        if not self.keep_shape:
            side = max(merge, int(target**0.5) // merge * merge)
            return np.full_like(heights, side * side)
        shape = np.maximum(widths, 1) / np.maximum(heights, 1)
        high = np.maximum(np.rint(np.sqrt(target / shape)), 1).astype(np.int64)
        wide = np.maximum(np.rint(np.sqrt(target * shape)), 1).astype(np.int64)
        if merge > 1:
            raised = [side + -side % merge for side in (high, wide)]
            lowered = [np.maximum(merge, side - side % merge) for side in (high, wide)]
            fits = raised[0] * raised[1] <= target
            high, wide = np.where(fits, raised[0], lowered[0]), np.where(fits, raised[1], lowered[1])
        patches: Ints = high * wide
        return patches
