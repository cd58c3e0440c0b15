"""Sound to tokens: samples at the extractor's rate to feature frames to tokens.

A processor pads the clips of a sample to the longest of them, and one family's count depends on that: rules get the
longest clip's samples beside each clip's own.
"""

from dataclasses import dataclass

import numpy as np

from vlm_stream.tokens.rules import Ints, MediaCounts


def resample_length(samples: Ints, rates: Ints, target_rate: int) -> Ints:
    """Return how many samples a clip has at another rate, rounded up as resamplers do."""
    rates = np.maximum(rates, 1)
    return np.where(rates == target_rate, samples, -(-samples * target_rate // rates))


def _halve(values: Ints, times: int) -> Ints:
    """Halve, rounding up, as a convolution of stride 2 does."""
    for _ in range(times):
        values = -(-values // 2)
    return values


def _count(tokens: Ints, frames: Ints) -> MediaCounts:
    tokens, frames = np.maximum(tokens, 0), np.maximum(frames, 0)
    return MediaCounts(tokens, frames, frames.astype(np.float64) ** 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sound:
    sampling_rate: int = 16000  # what sound is resampled to


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frames(_Sound):
    hop_length: int = 160  # samples from one frame to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedMel(_Frames):
    """Qwen3-Omni: mel frames, then three halvings inside windows."""

    window_frames: int = 100  # frames that are halved together

    def count_audios(self, samples: Ints, longest: Ints) -> MediaCounts:
        frames = np.minimum(-(-samples // self.hop_length), longest // self.hop_length)
        rest = frames % self.window_frames
        per_window = 13  # the processor's own number for a whole window, whatever its length
        tokens = np.where(rest > 0, _halve(rest, 3), 0) + frames // self.window_frames * per_window
        return _count(tokens, frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledMel(_Frames):
    """Qwen2.5-Omni: mel frames, halved by a convolution, then pooled in pairs; long clips are cut."""

    max_samples: int = 480000  # longer clips are cut

    def count_audios(self, samples: Ints, longest: Ints) -> MediaCounts:
        frames = -(-np.minimum(samples, self.max_samples) // self.hop_length)
        return _count(((frames - 1) // 2 - 1) // 2 + 1, frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSound(_Sound):
    """Gemma-3n: every clip costs the same."""

    tokens: int = 188

    def count_audios(self, samples: Ints, longest: Ints) -> MediaCounts:
        return _count(np.full_like(samples, self.tokens), np.full_like(samples, self.tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterBank(_Frames):
    """Phi-4-multimodal: overlapping frames, compressed twice."""

    frame_length: int = 400
    feature_stride: int = 1  # features of a frame
    compression: int = 8  # features that become one
    downsampling: int = 1  # compressed features that become one token

    def count_audios(self, samples: Ints, longest: Ints) -> MediaCounts:
        frames = ((samples - self.frame_length) // self.hop_length + 1) * self.feature_stride
        compressed = -(-frames // self.compression)
        return _count(-(-compressed // self.downsampling), frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolvedMel(_Frames):
    """Gemma-4: mel frames whose window holds only sound, halved twice; long clips are cut."""

    frame_length: int = 320
    max_samples: int = 480000  # longer clips are cut

    def count_audios(self, samples: Ints, longest: Ints) -> MediaCounts:
        heard = np.minimum(samples, self.max_samples)
        # Half a frame of silence precedes the sound; a frame counts when its last sample is sound.
        frames = (heard - 1 - (self.frame_length - self.frame_length // 2)) // self.hop_length + 1
        return _count(_halve(np.maximum(frames, 0), 2), frames)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedAudio(_Sound):
    """The unified Gemma-4: raw samples in chunks."""

    samples_per_token: int = 640

    def count_audios(self, samples: Ints, longest: Ints) -> MediaCounts:
        tokens = -(-samples // self.samples_per_token)
        return _count(tokens, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubsampledMel(_Frames):
    """Nemotron-H-Omni: centred mel frames, then convolutions of stride 2."""

    num_convolutions: int = 3

    def count_audios(self, samples: Ints, longest: Ints) -> MediaCounts:
        frames = 1 + samples // self.hop_length
        return _count(np.maximum(_halve(frames, self.num_convolutions), 1), frames)
