"""Text tokens and labels of a sample: exact with a processor; and whether the processor takes its media.

Without a processor text tokens are estimated and labels unknown.

Enters: the name of a processor, or None; then conversations with the sizes of their media. Leaves: counts, and the note
for the manifest of how they came about. A processor is loaded once per process. How counting works is the business of
`tokens`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from vlm_stream.conversation import given_tokens, iter_media
from vlm_stream.convert.rows import SampleCounts
from vlm_stream.errors import BadSampleError, ConfigError, blame_sample
from vlm_stream.format import TokenCounting
from vlm_stream.processors import load_processor, open_processor
from vlm_stream.tokens import Geometry, TextCounter, check_media_sizes, guess_text_tokens, template_digest

if TYPE_CHECKING:
    from vlm_stream.conversation import Conversation
    from vlm_stream.encode import Rendered, TypedMarkers
    from vlm_stream.tokens import MediaSizes

__all__ = ["EstimatingCounter", "ExactCounter", "SampleCounter", "open_counter"]


class SampleCounter(Protocol):
    """Counts the text tokens and the labels of samples."""

    @property
    def note(self) -> TokenCounting:
        """Return how the counts come about."""
        ...

    def count(self, conversation: Conversation, sizes: MediaSizes, known: Any = None) -> SampleCounts:
        """Return the tokens of one sample without its media, one for every media placeholder, and its labels.

        Args:
            conversation: The sample.
            sizes: Of its media.
            known: What the record itself says of its text tokens, if anything.

        Raises:
            BadSampleError: The processor would refuse the sample.
        """
        ...


class EstimatingCounter:
    """A third of the characters; a count that the record brings along goes before that."""

    def __init__(self) -> None:
        """Know only the limits that are common to all processors."""
        self._geometry = Geometry.unknown()

    @property
    def note(self) -> TokenCounting:
        """Return that counts are estimates."""
        return TokenCounting(kind="estimated")

    def count(self, conversation: Conversation, sizes: MediaSizes, known: Any = None) -> SampleCounts:
        """Return `known` and one for every medium if it is a count, else the guess."""
        check_media_sizes(sizes, self._geometry)
        if (given := given_tokens(known)) is not None:
            return SampleCounts(given + sum(1 for _ in iter_media(conversation)))
        return SampleCounts(guess_text_tokens(conversation))


class ExactCounter:
    """The rendered chat template of one processor, tokenised and labelled.

    Text is rendered, tokenised and labelled once, as the encoder does it, with one embedding token for each medium:
    the others are no labels, and special tokens split a text before any merging, so they change nothing else.
    """

    def __init__(self, name: str, processor: Any) -> None:
        """Learn how the processor writes, how answers are found in that, and what media it takes."""
        from vlm_stream.encode import EncodeConfig, Encoder

        self._counter = TextCounter(processor)
        self._encoder = Encoder(processor, EncodeConfig(allow_unlabelled=True))
        self._name = name

    @property
    def note(self) -> TokenCounting:
        """Return which processor counts."""
        import transformers

        processor = self._counter.processor
        return TokenCounting(
            kind="exact" if self._counter.geometry.is_exact else "estimated",
            processor=self._name,
            processor_class=type(processor).__name__,
            template_sha256=template_digest(processor),
            library=f"transformers {transformers.__version__}",
            geometry=self._counter.geometry.to_json(),
        )

    def count(self, conversation: Conversation, sizes: MediaSizes, known: Any = None) -> SampleCounts:  # noqa: ARG002
        """Return the exact counts; labels are unknown where an answer holds media."""
        check_media_sizes(sizes, self._counter.geometry)
        try:
            return self._count(conversation, sizes)
        except Exception as error:  # templates and tokenizers raise anything on content they do not accept
            fact = f"{type(self._counter.processor).__name__} refused the sample"
            raise blame_sample(error, "convert", "processor_error", fact) from error

    def _count(self, conversation: Conversation, sizes: MediaSizes) -> SampleCounts:
        try:
            rendered, markers = self._encoder.render(conversation)
        except BadSampleError:  # it will be a hole
            return SampleCounts(self._counter.count(conversation, sizes), 0)
        ids, surplus = self._counter.encode(rendered.text, sizes)
        try:
            counts = self._count_labels(conversation, rendered, markers, ids)
        except BadSampleError:  # likewise
            counts = SampleCounts(len(ids), 0)
        return counts._replace(text_tokens=max(counts.text_tokens - surplus, 0))

    def _count_labels(
        self, conversation: Conversation, rendered: Rendered, markers: TypedMarkers | None, ids: list[int]
    ) -> SampleCounts:
        import torch

        from vlm_stream.encode import IGNORE

        row = torch.from_numpy(np.array(ids, dtype=np.int64))  # quicker than torch is with a list
        if markers is not None:
            row = self._encoder.splice({"input_ids": row}, rendered, markers)["input_ids"]
        if any(message.get("role") == "assistant" and any(iter_media([message])) for message in conversation):
            return SampleCounts(len(row))
        labels = self._encoder.label(conversation, rendered, row)
        # Nothing comes before the first token, so no loss learns it.
        return SampleCounts(len(row), int(np.count_nonzero(labels.numpy()[1:] != IGNORE)))


_opened: dict[Any, tuple[Any, SampleCounter]] = {}
"""By name, or by the identity of an object, which is kept with its counter."""


def open_counter(processor: Any, *, trust_remote_code: bool = False) -> SampleCounter:
    """Return the counter for a processor, or for the name or path of one, loaded once per process.

    Raises:
        ConfigError: There is no such processor.
    """
    if processor is None:
        return EstimatingCounter()
    is_name = isinstance(processor, (str, os.PathLike))
    key = (os.fspath(processor), trust_remote_code) if is_name else id(processor)
    if key not in _opened:
        _opened[key] = (processor, _make_counter(processor, trust_remote_code=trust_remote_code))
    return _opened[key][1]


def _make_counter(processor: Any, *, trust_remote_code: bool) -> SampleCounter:
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
