"""Datasets around datasets: conversations, encoded samples, packs; with something else in place of what is bad.

Enters: a dataset (anything with `len` and item access). Leaves: its items, decoded, encoded or packed in the worker
that is asked for them. The dataset's own dicts are never written to, so memory does not grow with what was visited.

What takes the place of a bad item depends on its index (or on the texts and ids of the batch) and on the attempt alone,
so any number of workers, in any order, after any restart, draws the same; and each failure is a line in the ledger or
the log. The stream uses none of this: it records bad samples and leaves them out.
"""

import logging
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from vlm_stream.collate import (
    ModelPositions,
    PositionRule,
    WeightlessPositions,
    align_up,
    as_documents,
    build_packed_vlm_sample,
    family_of,
    shift_sample,
)
from vlm_stream.conversation import Conversation, Item, iter_media, map_media, without_span
from vlm_stream.encode import (
    EncodeConfig,
    Encoder,
    LoadedMedia,
    fit_length,
    has_media,
    inject_fake_image,
    load_media,
    make_fake_image,
    message_text,
    processor_reads,
)
from vlm_stream.errors import BadSampleError, ConfigError, InputError
from vlm_stream.keys import INJECTED_FAKE_KEY, POSITIONS_KEY
from vlm_stream.ledger import BadSample, Ledger
from vlm_stream.plan import Key, words

logger = logging.getLogger(__name__)


def replacement_index(index: int, attempt: int, count: int, *, seed: int = 0) -> int:
    """Return another index than `index` of `range(count)`; the same one for the same arguments, always."""
    if count < 2:
        return index
    word = words(Key(seed=seed, purpose="replace", epoch=attempt, index=index), 1)[0]
    return (index + 1 + int(word) % (count - 1)) % count


class ReplacingDataset(Dataset[Any]):
    """A dataset that gives something else in place of what is bad.

    Attributes:
        max_retries: How many items are tried for one.
        ledger: What failed in this process.
    """

    def __init__(self, max_retries: int, seed: int, ledger_path: str | None) -> None:
        """Begin an empty ledger; every process appends to the file what failed, because a worker's own ends with it."""
        self.max_retries = max_retries
        self.ledger = Ledger()
        self._seed, self._ledger_path = seed, ledger_path

    def robust_collate(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a collate function so that a batch that fails is replaced by other items of this dataset."""
        return make_robust_collate(self, collate_fn, self.max_retries)

    def _fetch(self, load: Callable[[int], Any], index: int, count: int) -> Any:
        """Return `load(index)`, or that of another index if it fails; no other item mends an `InputError`."""
        place, error = index, None
        for attempt in range(self.max_retries):
            self.ledger.saw()
            try:
                return load(place)
            except InputError:
                raise
            except Exception as caught:  # datasets raise anything
                error = caught
                self._note(str(place), caught)
            place = replacement_index(index, attempt, count, seed=self._seed)
        raise RuntimeError(
            f"Failed to load a valid sample after {self.max_retries} retries for item {index} of "
            f"{type(self).__name__}; the last error was {error!r}. Mend the data: its ledger names what failed."
        ) from error

    def _note(self, sample: str, error: Exception) -> None:
        """Record one failure."""
        stage, reason = "read", type(error).__name__
        if isinstance(error, BadSampleError):
            stage, reason = error.stage, error.reason
        bad = BadSample(source=type(self).__name__, sample=sample, stage=stage, reason=reason, detail=str(error))
        logger.warning("%s", bad)
        if self._ledger_path is not None:
            with Path(self._ledger_path).open("a", encoding="utf-8") as lines:
                lines.write(bad.to_json() + "\n")
        self.ledger.add(bad)


def make_robust_collate(
    dataset: Any, collate_fn: Callable[[Sequence[Any]], Any], max_retries: int = 10
) -> Callable[[Sequence[Any]], Any]:
    """Wrap a collate function so that a batch that fails is replaced by other examples of the dataset.

    Args:
        dataset: Where the replacements come from (`len` and item access).
        collate_fn: What is called with the batch.
        max_retries: How often it may fail.

    Returns:
        The wrapped function; it raises RuntimeError, with the last error as its cause, when the retries are used up.
    """

    def robust(batch: Sequence[Any]) -> Any:
        error: Exception | None = None
        seed = zlib.crc32("\1".join(map(_identity, batch)).encode())
        for attempt in range(max_retries):
            try:
                return collate_fn(batch)
            except Exception as caught:
                error = caught
                rng = random.Random(f"{seed}:{attempt}")
                places = [rng.randrange(len(dataset)) for _ in batch]
                logger.warning(
                    "A batch of %d failed to collate (%r); it is replaced by the examples %s.",
                    len(batch),
                    caught,
                    places,
                )
                batch = [dataset[place] for place in places]
        raise RuntimeError(f"Collate failed after {max_retries} retries: {error!r}") from error

    return robust


def _identity(example: Any) -> str:
    """Return what tells an example from others: its texts, its ids, or those of the samples that are packed in it."""
    if isinstance(example, (list, tuple)):
        return "\2".join(map(_identity, example))
    if not isinstance(example, dict):
        return repr(type(example))
    conversation, ids = example.get("conversation"), example.get("input_ids")
    texts = [message_text(message) for message in conversation] if conversation else []
    return "\0".join([*texts, "" if ids is None else str(torch.as_tensor(ids).tolist())])


class RobustDatasetWrapper(ReplacingDataset):
    """Items of a dataset, whatever is wrong with some of them.

    Attributes:
        preload_media: Decode media here, in the worker, and give text-only conversations a fake image.
        processor: Whose frame rule and sampling rate decide how videos and sound are read; images need none.
        ledger: What was replaced in this process.
    """

    def __init__(self, dataset: Any, max_retries: int = 10, *, seed: int = 0, ledger_path: str | None = None) -> None:
        """Wrap a dataset.

        Args:
            dataset: Anything with `len` and item access.
            max_retries: How many items are tried for one.
            seed: Chooses which items stand in for others.
            ledger_path: File to which all workers append what failed.
        """
        super().__init__(max_retries, seed, ledger_path)
        self.dataset = dataset
        self.preload_media = False
        self.processor: Any = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> Any:
        return self._fetch(self._load, idx, len(self.dataset))

    def _load(self, index: int) -> Any:
        example = self.dataset[index]
        if not self.preload_media or not example.get("conversation"):
            return example
        conversation = self._with_media(example["conversation"])
        if has_media(conversation):
            return {**example, "conversation": conversation}
        faked = inject_fake_image(conversation, make_fake_image())
        return {**example, "conversation": faked, INJECTED_FAKE_KEY: True}

    def _with_media(self, conversation: Conversation) -> Conversation:
        """Return a copy whose media are decoded."""
        kinds = {item["type"] for item in iter_media(conversation)}
        config = EncodeConfig()
        reads = processor_reads(self.processor, config)
        if self.processor is None:
            if kinds - {"image"}:
                raise ConfigError(
                    "preload_media meets a video or sound and has no processor, which says how these are read. Set "
                    "the wrapper's processor attribute."
                )
            reads = replace(reads, media=frozenset({"image"}))
        return _with_loaded(conversation, load_media(conversation, {}, config, reads)) if kinds else conversation


def _with_loaded(conversation: Conversation, loaded: LoadedMedia) -> Conversation:
    """Return a copy whose media items hold decoded media; `loaded` has them in the order of the items."""
    images, videos, audios = iter(loaded.images), iter(loaded.videos), iter(loaded.audios)

    def fill(item: Item) -> Item:
        if item["type"] != "video":
            return without_span({**item, item["type"]: next(images if item["type"] == "image" else audios)})
        video = next(videos)
        facts = {"_frame_indices": list(video.indices), "_total_frames": video.info.frames}
        return without_span({**item, "video": video.frames, "_video_fps": video.info.fps, **facts})

    return map_media(conversation, fill)


class PreTokenizedDatasetWrapper(ReplacingDataset):
    """Encoded samples: `input_ids`, `attention_mask`, `labels` of one length, and media tensors; nothing is shifted.

    Attributes:
        ledger: What was replaced in this process.
    """

    def __init__(
        self,
        dataset: Any,
        processor: Any,
        max_length: int | None = None,
        max_retries: int = 10,
        truncate: bool = False,
        post_tokenize_hook: Callable[[dict[str, Any], Any], dict[str, Any]] | None = None,
        inject_fake_images: bool = True,
        *,
        seed: int = 0,
        ledger_path: str | None = None,
    ) -> None:
        """Wrap a dataset.

        Args:
            dataset: Samples with a `conversation` whose media are files, bytes or decoded objects.
            processor: A transformers processor.
            max_length: Longest sample in tokens; longer ones are replaced, or cut.
            max_retries: How many samples are tried for one.
            truncate: Cut samples that are too long, unless the cut would take media away.
            post_tokenize_hook: Called as `hook(batch, processor)` with the processor's batch `[1, S]` of one sample,
                before there are labels; they follow the ids that it returns.
            inject_fake_images: Give text-only samples an image that attention does not see.
            seed: Chooses which samples stand in for others.
            ledger_path: File to which all workers append what failed.
        """
        super().__init__(max_retries, seed, ledger_path)
        self.dataset = dataset
        self.processor = processor
        self.max_length = max_length
        self.truncate = truncate
        self.post_tokenize_hook = post_tokenize_hook
        config = EncodeConfig(inject_fake_image=inject_fake_images)
        steps = replace(family_of(processor, encodes=True).steps_for(processor), hook=post_tokenize_hook)
        self._encoder = Encoder(processor, config, steps)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        sample: dict[str, Any] = self._fetch(self.encode, idx, len(self.dataset))
        return sample

    def encode(self, index: int) -> dict[str, Any]:
        """Return this very sample, encoded.

        Raises:
            BadSampleError: It cannot be used.
        """
        sample = self._encoder.encode(self.dataset[index]["conversation"], {})
        if self.max_length is not None:
            sample = fit_length(self.processor, sample, self.max_length, "truncate" if self.truncate else "bad")
        return sample


class PackedDatasetWrapper(ReplacingDataset):
    """Packs of an encoded dataset; a bad sample leaves room in its pack and is not replaced.

    Attributes:
        has_mrope: Whether packs carry multi-axis positions.
        visual_loads: Estimated visual tokens of each pack, or None where they are not known.
        ledger: What was left out in this process.
    """

    def __init__(
        self,
        inner_dataset: Any,
        bins: list[list[int]],
        pack_size: int,
        padding_idx: int = 0,
        get_rope_index: Callable[..., Any] | None = None,
        max_retries: int = 10,
        sequence_alignment: int = 1,
        *,
        seed: int = 0,
        ledger_path: str | None = None,
    ) -> None:
        """Keep the bins; samples are encoded when a pack is asked for.

        Args:
            inner_dataset: Encoded samples, such as a `PreTokenizedDatasetWrapper`.
            bins: Indices of each pack.
            pack_size: The most tokens of a pack, after the shift.
            padding_idx: Token that fills aligned documents.
            get_rope_index: A model's method, a `PositionRule`, or None for plain positions.
            max_retries: How many samples are tried for a pack of which nothing fits.
            sequence_alignment: Documents are padded to a multiple of it.
            seed: Chooses which samples stand in for others.
            ledger_path: File to which all workers append what was left out.
        """
        super().__init__(max_retries, seed, ledger_path)
        self.inner_dataset = inner_dataset
        self.bins = bins
        self.pack_size = pack_size
        self.padding_idx = padding_idx
        self.sequence_alignment = sequence_alignment
        self.has_mrope = get_rope_index is not None
        self.visual_loads: list[int] | None = None
        is_rule = isinstance(get_rope_index, (PositionRule, ModelPositions, WeightlessPositions))
        self._positions = get_rope_index if is_rule or get_rope_index is None else ModelPositions(get_rope_index)

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, pack_idx: int) -> dict[str, Any]:
        kept: list[dict[str, Any]] = []
        for index in self.bins[pack_idx]:
            self.ledger.saw()
            try:
                kept = self._fit(kept, self._load(index))
            except Exception as error:  # datasets raise anything; one sample less is all it may cost
                self._note(f"{index} in pack {pack_idx}", error)
        if not kept:
            # A pack without samples would not stack with others; the first index is as good a key as any.
            first = self.bins[pack_idx][0] if self.bins[pack_idx] else pack_idx
            kept = self._fetch(lambda i: self._fit([], self._load(i)), first, len(self.inner_dataset))
        return build_packed_vlm_sample(kept, self.pack_size, self.padding_idx, self.has_mrope, self.sequence_alignment)

    def _load(self, index: int) -> dict[str, Any]:
        # A dataset that replaces bad samples may give this pack one that another pack has; better one less.
        sample = getattr(self.inner_dataset, "encode", self.inner_dataset.__getitem__)(index)
        positions = self._positions(sample) if self._positions is not None else None
        return shift_sample(sample if positions is None else {**sample, POSITIONS_KEY: positions}, self.has_mrope)

    def _fit(self, kept: list[dict[str, Any]], sample: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the samples with one more; raise `BadSampleError` if the pack would be too long."""
        together = [*kept, sample]
        slots = [align_up(len(d["input_ids"]), self.sequence_alignment) for d in as_documents(together)]
        if sum(slots) > self.pack_size:
            raise BadSampleError(
                "fit",
                "pack_overflow",
                f"{len(sample['input_ids'])} tokens do not fit into what is left of a pack of {self.pack_size}; its "
                f"estimate was too low. Lower packing_ratio to leave room.",
            )
        return together
