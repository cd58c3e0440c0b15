"""Text tokens and labels of a sample: exact with a processor; and whether the processor takes its media.

Without a processor text tokens are estimated and labels unknown.

Enters: the name of a processor, or None; then conversations with the sizes of their media. Leaves: counts, and the note
for the manifest of how they came about. A processor is loaded once per process. How counting works is the business of
`tokens`.
"""

import os
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from vlm_stream.conversation import Conversation, given_tokens, iter_media
from vlm_stream.convert.rows import SampleCounts
from vlm_stream.encode import Rendered, Steps, TypedMarkers, inject_fake_image, kept_text_key, pack_text
from vlm_stream.errors import BadSampleError, ConfigError, blame_sample
from vlm_stream.format import TokenCounting
from vlm_stream.keys import FAKE_IMAGE_SIZE, IGNORE
from vlm_stream.processors import load_processor, open_processor
from vlm_stream.tokens import (
    Geometry,
    ImageSize,
    MediaSizes,
    TextCounter,
    check_media_sizes,
    count_tokens,
    guess_text_tokens,
    make_columns,
    repeats_one_token,
    template_digest,
)

Ints = npt.NDArray[np.int64]


class Counted(NamedTuple):
    """What was learned of a sample's text."""

    counts: SampleCounts
    tokens: dict[str, Any] | None = None  # a JSON value, kept beside the conversation; None: training tokenises it


class EstimatingCounter:
    """A third of the characters; a count that the record brings along goes before that."""

    note: Final = TokenCounting(kind="estimated")

    def __init__(self) -> None:
        self.geometry = Geometry.unknown()

    def count(self, conversation: Conversation, sizes: MediaSizes, known: Any = None) -> SampleCounts:
        """Return a guess; or `known`, what the record says of its text, and one for every medium, if it is a count."""
        check_media_sizes(sizes, self.geometry)
        if (given := given_tokens(known)) is not None:
            return SampleCounts(given + sum(1 for _ in iter_media(conversation)))
        return SampleCounts(guess_text_tokens(conversation))

    def count_and_keep(self, conversation: Conversation, sizes: MediaSizes, known: Any = None) -> Counted:
        return Counted(self.count(conversation, sizes, known))

    def remember_in(self, root: str) -> None:
        """Keep nothing: nothing is measured."""


class ExactCounter:
    """The rendered chat template of one processor, tokenised and labelled.

    Text is rendered, tokenised and labelled once, as the encoder does it, with one embedding token for each medium:
    the others are no labels, and special tokens split a text before any merging, so they change nothing else.
    """

    def __init__(self, name: str, processor: Any, steps: Steps | None = None) -> None:
        """Learn how the processor writes, how answers are found in that, and what media it takes.

        `name` is for the note. Samples are encoded by `steps`, by those of the processor's family where none are given.
        """
        from vlm_stream.collate import family_of
        from vlm_stream.encode import EncodeConfig, Encoder

        steps = family_of(processor, encodes=True).steps_for(processor) if steps is None else steps
        self._counter = TextCounter(processor)
        self._encoder = Encoder(processor, EncodeConfig(allow_unlabelled=True), steps)
        self._name = name
        self._is_encoded = steps.changes_text
        """Whether the family writes otherwise than by its chat template, so that only encoding tells."""

    @property
    def note(self) -> TokenCounting:
        import transformers

        processor = self._counter.processor
        return TokenCounting(
            kind="exact" if self._is_encoded or self.geometry.is_exact else "estimated",
            processor=self._name,
            processor_class=type(processor).__name__,
            template_sha256=self._template_sha256,
            library=f"transformers {transformers.__version__}",
            geometry=self.geometry.to_json(),
        )

    @property
    def geometry(self) -> Geometry:
        return self._counter.geometry

    def remember_in(self, root: str) -> None:
        """Keep what the processor answers of media in a dataset's folder, for other processes and for plans over it."""
        if (folder := Path(root)).is_absolute():  # and no URL
            self.geometry.remember_in([folder])

    @cached_property
    def _template_sha256(self) -> str:
        return template_digest(self._counter.processor)

    def count(self, conversation: Conversation, sizes: MediaSizes, known: Any = None) -> SampleCounts:
        """Return the tokens of text, one for every medium, and the labels: unknown where an answer holds media."""
        return self.count_and_keep(conversation, sizes, known).counts

    def count_and_keep(self, conversation: Conversation, sizes: MediaSizes, known: Any = None) -> Counted:  # noqa: ARG002
        """Return the exact counts, and the tokens of samples without media or with images only."""
        check_media_sizes(sizes, self.geometry)
        try:
            return self._count(conversation, sizes)
        except Exception as error:  # templates and tokenizers raise anything on content they do not accept
            fact = f"{type(self._counter.processor).__name__} refused the sample"
            raise blame_sample(error, "convert", "processor_error", fact) from error

    def _count(self, conversation: Conversation, sizes: MediaSizes) -> Counted:
        if self._is_encoded:
            return Counted(self._encode(conversation, sizes))
        try:
            rendered, markers = self._encoder.render(conversation)
        except BadSampleError:  # it will be a hole
            return Counted(SampleCounts(self._counter.count(conversation, sizes), 0))
        ids, surplus = self._counter.encode(rendered.text, sizes)
        try:
            row, labels = self._place_labels(conversation, rendered, markers, ids)
        except BadSampleError:  # likewise
            return Counted(SampleCounts(max(len(ids) - surplus, 0), 0))
        if labels is None:
            return Counted(SampleCounts(max(len(row) - surplus, 0)))
        # Nothing comes before the first token, so no loss learns it.
        counts = SampleCounts(max(len(row) - surplus, 0), int(np.count_nonzero(labels[1:] != IGNORE)))
        is_one_run = repeats_one_token(self.geometry.image)
        if surplus or sizes.videos or sizes.audios or (sizes.images and not is_one_run):
            return Counted(counts)
        faked = None if sizes.images or not is_one_run else self._with_fake(conversation)
        return Counted(counts, pack_text(kept_text_key(self._template_sha256), row, labels, faked))

    def _with_fake(self, conversation: Conversation) -> tuple[Ints, Ints] | None:
        """Return ids and labels of a text with the image that stands for none, as recipes may want it."""
        height, width = FAKE_IMAGE_SIZE
        conversation = inject_fake_image(conversation)
        try:
            rendered, markers = self._encoder.render(conversation)
            ids, _ = self._counter.encode(rendered.text, MediaSizes(images=(ImageSize(height=height, width=width),)))
            row, labels = self._place_labels(conversation, rendered, markers, ids)
        except Exception:  # it can be trained on without that image, and with it is encoded in full
            return None
        return None if labels is None else (row, labels)

    def _encode(self, conversation: Conversation, sizes: MediaSizes) -> SampleCounts:
        try:
            sample = self._encoder.encode_blank(conversation, sizes)
        except BadSampleError:  # it will be a hole
            return SampleCounts(guess_text_tokens(conversation), 0)
        media = int(count_tokens(make_columns([sizes], [0]), self.geometry).tokens[0])
        num_labels = int(np.count_nonzero(sample["labels"].numpy()[1:] != IGNORE))
        return SampleCounts(max(len(sample["input_ids"]) - media, 0), num_labels)

    def _place_labels(
        self, conversation: Conversation, rendered: Rendered, markers: TypedMarkers | None, ids: list[int]
    ) -> tuple[Ints, Ints | None]:
        """Return ids and labels of the text; no labels where an answer holds media."""
        import torch

        row = torch.from_numpy(np.array(ids, dtype=np.int64))  # quicker than torch is with a list
        if markers is not None:
            row = self._encoder.splice({"input_ids": row}, rendered, markers)["input_ids"]
        if any(message.get("role") == "assistant" and any(iter_media([message])) for message in conversation):
            return row.numpy(), None
        return row.numpy(), self._encoder.label(conversation, rendered, row).numpy()


SampleCounter: TypeAlias = EstimatingCounter | ExactCounter

_opened: dict[Any, tuple[Any, ExactCounter]] = {}
"""By name, or by the identity of an object, which is kept with its counter."""


def open_counter(processor: Any, *, trust_remote_code: bool = False) -> SampleCounter:
    """Return the counter for a processor, or for the name or path of one, loaded once per process."""
    if processor is None:
        return EstimatingCounter()
    is_name = isinstance(processor, (str, os.PathLike))
    key = (os.fspath(processor), trust_remote_code) if is_name else id(processor)
    if key not in _opened:
        _opened[key] = (processor, _make_counter(processor, trust_remote_code=trust_remote_code))
    return _opened[key][1]


def _make_counter(processor: Any, *, trust_remote_code: bool) -> ExactCounter:
    if isinstance(processor, (str, os.PathLike)):
        name = os.fspath(processor)
        return ExactCounter(name, load_processor(name, trust_remote_code=trust_remote_code))
    loaded = open_processor(processor)
    if not callable(loaded) or not hasattr(getattr(loaded, "tokenizer", loaded), "get_vocab"):
        raise ConfigError(
            f"the processor is a {type(loaded).__name__}, with which no text can be counted; give the name or path of "
            f"a transformers processor, or the object that from_pretrained returns."
        )
    return ExactCounter(str(getattr(getattr(loaded, "tokenizer", loaded), "name_or_path", "")), loaded)
