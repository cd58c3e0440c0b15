"""Samples, steps and batches as one HTML file, for people on a cluster and for notebooks.

Enters: a viewer and what is to be shown. Leaves: `Shown`, whose text is a whole document: media are in it, and it loads
and runs nothing.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vlm_stream.encode import IGNORE
from vlm_stream.errors import BadSampleError, ConfigError, InputError
from vlm_stream.format import medium_of
from vlm_stream.view.catalog import Name
from vlm_stream.view.frame import Links, file_document, note
from vlm_stream.view.html import Html, join, tag
from vlm_stream.view.page_sample import prompt_body, sample_body
from vlm_stream.view.page_step import step_body
from vlm_stream.view.pictures import type_of
from vlm_stream.view.routes import no_picture
from vlm_stream.view.rows import Document, Row, StepView, kinds_of, labels_at
from vlm_stream.view.sample import Prompt, prompt_runs

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from vlm_stream.plan import Ref
    from vlm_stream.view.sample import Medium, Sample
    from vlm_stream.view.viewer import Viewer

_MAX_INLINE: Final = 4 << 20
"""Bytes of a clip or a sound that a file holds."""
_MAX_SAMPLES: Final = 12
"""Samples of a step or a batch that are shown with their media."""
_MAX_ROWS: Final = 16
"""Rows of a batch whose text is shown."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A document that a notebook shows as the last value of a cell."""

    html: str

    def _repr_html_(self) -> str:
        """Return the document in a frame of its own, in which nothing of it can run."""
        return tag("iframe", srcdoc=self.html, sandbox="", width="100%", height="720", style="border: 0")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document."""
        Path(path).write_text(self.html, encoding="utf-8")

    def __repr__(self) -> str:
        """Return how large it is."""
        return f"Shown({len(self.html):,} characters of HTML; .save(path) writes them)"


class FileLinks(Links):
    """Links of a single file: media are in it, other pages are nowhere."""

    def __init__(self, viewer: Viewer) -> None:
        """Read media of a viewer's datasets."""
        self._viewer = viewer

    def member(self, sample: Sample, member: str) -> str | None:
        """Return clips and sounds that are small enough; pictures are drawn anyway."""
        size = next((size for name, _, size in sample.members if name == member), 0)
        kind = type_of(member)
        if medium_of(member) not in ("video", "audio") or kind is None or size > _MAX_INLINE:
            return None
        (drawn,) = self._viewer.catalog.draw([sample.ref])
        try:
            return _data(kind, self._viewer.catalog.read_member(drawn, member))
        except BadSampleError:
            return None

    def picture(self, sample: Sample, medium: Medium) -> str:
        """Return an image as the model sees it."""
        return _drawn(lambda: self._viewer.samples.picture(sample.ref, medium.number))

    def frame(self, sample: Sample, medium: Medium, place: int) -> str:
        """Return one of a clip's frames that are shown."""
        return _drawn(lambda: self._viewer.frames_of(sample.ref, medium.number)[place])


def _data(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _drawn(draw: Callable[[], bytes]) -> str:
    try:
        return _data("image/jpeg", draw())
    except (BadSampleError, InputError, IndexError) as error:
        return _data("image/jpeg", no_picture(str(error)))


def show_samples(viewer: Viewer, refs: Sequence[Ref]) -> Shown:
    """Return single samples, one below the other."""
    links = FileLinks(viewer)
    samples = [viewer.samples.read(ref) for ref in refs]
    return _shown(", ".join(sample.name.key for sample in samples), *(sample_body(each, links) for each in samples))


def show_step(viewer: Viewer, view: StepView) -> Shown:
    """Return what a rank gets at a step, and its first samples."""
    links = FileLinks(viewer)
    title = f"Step {view.number}, rank {view.rank} of {len(view.llm)}"
    refs = [each.ref for micro in view.micro_batches for row in micro for each in row.documents]
    bodies = [sample_body(viewer.samples.read(ref), links) for ref in refs[:_MAX_SAMPLES]]
    left = len(refs) - len(bodies)
    more = note(f"{left} more samples are in it: name one with --key.") if left > 0 else None
    return _shown(title, tag("h1", title), step_body(view, links), *bodies, more)


def show_batch(viewer: Viewer, batch: Mapping[str, Any]) -> Shown:
    """Return a batch that was delivered: its rows as strips, and what the model reads in them.

    Raises:
        ConfigError: It has no ids, or there is no processor to read them with.
    """
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if ids is None or labels is None or viewer.processor is None:
        raise ConfigError(
            "this batch has no input_ids and labels, or the loader no processor, so there is nothing to read in it; "
            "show a batch as the loader delivered it"
        )
    ids, labels = ids.reshape(-1, ids.shape[-1]), labels.reshape(-1, labels.shape[-1])
    names = batch.get("refs") or [()] * len(ids)
    parts: list[Html] = []
    rows = []
    for place in range(len(ids)):
        own_ids, own_labels = ids[place].tolist(), labels_at(labels[place].tolist(), viewer.options)
        documents = _documents(viewer, names[place] if place < len(names) else ())
        length = sum(each.tokens for each in documents) or len(own_ids)
        runs = tuple(kinds_of(viewer.processor, own_ids[:length], own_labels[:length]))
        rows.append(Row(documents=tuple(documents), slots=len(own_ids), runs=runs))
        if place < _MAX_ROWS:
            prompt = Prompt(
                runs=tuple(prompt_runs(viewer.processor, own_ids, own_labels)),
                num_tokens=len(own_ids),
                num_labels=sum(label != IGNORE for label in own_labels),
            )
            parts.append(join(tag("h2", f"Row {place}"), prompt_body(prompt)))
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items() if hasattr(value, "shape"))
    view = StepView(micro_batches=(tuple(rows),), bad=())
    says = "" if "refs" in batch else "Deliver batches with with_refs=True to see the samples in them, and their media."
    links = FileLinks(viewer)
    refs = list(dict.fromkeys(each.ref for row in rows for each in row.documents))
    samples = [sample_body(viewer.samples.read(ref), links) for ref in refs[:_MAX_SAMPLES]]
    more = note(f"{len(refs) - len(samples)} more samples are in it.") if len(refs) > len(samples) else None
    head = (tag("h1", "A batch"), tag("p", shapes, class_="soft"), note(says) if says else None)
    return _shown("A batch", *head, step_body(view, links), *parts, *samples, more)


def _documents(viewer: Viewer, names: Sequence[Sequence[Any]]) -> list[Document]:
    found = []
    for source, shard, key, _entry, own_id in names:
        name = Name(source, shard, key)
        ref = viewer.catalog.find(name)
        columns = viewer.plan.planner.read_columns(ref.source, [ref.shard]).pick(np.array([ref.row]))
        tokens, vision = int(columns.tokens[0]), int(columns.vision_tokens[0])
        found.append(Document(ref=ref, name=name, id=own_id, tokens=tokens, vision=vision))
    return found


def _shown(title: str, *body: Any) -> Shown:
    return Shown(str(file_document(title, *body)))
