"""The opened sources of a mixture: any URL becomes an opened dataset; what the plan asks is asked of all of them."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from vlm_stream.collate import Family, family_of
from vlm_stream.convert import GuessFit, Need, fit_guess, open_blends, open_dataset
from vlm_stream.encode import kept_text_key
from vlm_stream.errors import ConfigError, DatasetError, InputError, nearest_name, shorten
from vlm_stream.format import Drawn, IndexCache, OpenDataset, texts_name
from vlm_stream.options import StreamOptions
from vlm_stream.plan import Ref
from vlm_stream.recipe import SourceOptions
from vlm_stream.storage import Span
from vlm_stream.tokens import FrameText, Geometry

logger = logging.getLogger(__name__)


class Datasets:
    """The opened sources of a mixture: what the plan asks of their indexes, and where drawn samples lie."""

    def __init__(self, sources: Sequence[SourceOptions], options: StreamOptions, need: Need = "members") -> None:
        """Read the manifests; tars without one are indexed for what their samples are needed for."""
        self.cache = cache = IndexCache(options.index_bytes)
        self.lock = threading.Lock()
        """One thread at a time reads indexes: that of a running plan, or one that counts batches."""
        self._told_text: set[str] = set()
        self.sources: list[SourceOptions] = []
        """Those of the plan: one for each entry of a dataset whose entries have weights."""
        self.opened: list[OpenDataset] = []
        for source in open_blends(sources, options.store):
            dataset = open_dataset(source.url, options.store, cache, need=need)
            if not sum(dataset.samples_per_shard):
                raise DatasetError(
                    f"the dataset at {source.url} has no samples, so there is nothing to stream; "
                    f"look at the ledger of its conversion, or leave the source out"
                )
            if not source.weights:
                self.sources.append(source)
                self.opened.append(dataset)
            for entry in _drawn_entries(source, dataset):
                self.sources.append(source.of_entry(entry))
                self.opened.append(dataset.view(entry))

    def geometry(self) -> Geometry:
        """Return the geometry that the datasets were counted with."""
        found: list[Geometry] = []
        for dataset in self.opened:
            geometry = dataset.manifest.geometry
            if geometry not in found:
                found.append(geometry)
        if len(found) > 1:
            raise ConfigError(
                f"the sources were counted for different processors ({', '.join(g.family for g in found)}), so "
                f"their lengths do not compare; name the one that trains with --processor"
            )
        return found[0]

    def check_counted_for(self, text: str, geometry: Geometry) -> None:
        """Warn where an index was counted for another processor, or not counted at all: plans are then estimates.

        What stands around a medium is text where a rule counts the medium, and belongs to it where it is measured.
        """
        counts = {
            source.url: dataset.manifest.tokens for source, dataset in zip(self.sources, self.opened, strict=True)
        }
        for url, counted in counts.items():
            if counted.template_sha256 != text:  # media of a processor that cannot be asked stay estimates
                how = f"for {counted.processor_class}" if counted.kind == "exact" else "by a guess"
            elif _is_measured(counted.geometry) != geometry.is_measured:
                changes = "counted by rule, which are now measured", "measured, which are now counted by rule"
                how = f"beside media that were {changes[not geometry.is_measured]}"
            else:
                continue
            logger.warning(
                "the text tokens of %s were counted %s, so packs may come out too long or too short; "
                "count them for this processor with: vlm-stream recount --processor ... %s",
                url,
                how,
                url,
            )

    def check_text_only(self, tokenizer: Any) -> None:
        """Refuse a bare tokenizer where there are media."""
        for source, dataset in zip(self.sources, self.opened, strict=True):
            totals = dataset.manifest.totals
            if totals.samples != totals.text_only:
                raise ConfigError(
                    f"the processor is a {type(tokenizer).__name__}, which reads text alone, and "
                    f"{totals.samples - totals.text_only} of the {totals.samples} samples of {source.url} have media, "
                    f"so none of them could be encoded; give the model's processor (AutoProcessor.from_pretrained)"
                )

    def fit_guesses(
        self, processor: Any, geometry: Geometry, options: StreamOptions, family: Family
    ) -> tuple[GuessFit | None, ...]:
        """Return how to correct the text lengths of each source; None where they were counted as they will be encoded.

        Packs of guessed lengths, or of samples that a family chosen by name lengthens, would overflow, and what does
        not fit its row is lost.
        """
        if options.mode != "packed":
            return (None,) * len(self.opened)
        steps = family.steps_for(processor)
        is_other = steps.changes_text and family.name != family_of(processor, encodes=True).name
        fits = []
        for source, dataset in zip(self.sources, self.opened, strict=True):
            is_guess = is_other or not dataset.manifest.tokens.template_sha256
            fit = fit_guess(dataset, processor, geometry, options.store, steps) if is_guess else None
            fits.append(fit)
            if fit is not None:
                logger.warning(
                    "packs of %s are planned with %.3g times the text of its index and %.3g tokens a sample, as %d of "
                    "its samples need; rows would be fuller if all were counted",
                    source.url,
                    fit.slope * fit.margin,
                    fit.offset * fit.margin,
                    fit.num_samples,
                )
        return tuple(fits)

    def frame_texts(self, processor: Any, geometry: Geometry, text: str) -> tuple[FrameText | None, ...]:
        """Return what corrects the text of each source; None where it was not counted for this processor."""
        if not geometry.frames.keyframes or not text:
            return ()
        manifests = [dataset.manifest for dataset in self.opened]
        return tuple(
            FrameText(processor, each.geometry, geometry) if each.tokens.template_sha256 == text else None
            for each in manifests
        )

    def find(self, name: str) -> list[Ref]:
        """Return the samples with that key, or with that id of their own.

        Raises:
            InputError: There is none.
        """
        with self.lock:
            found = [Ref(number, *place) for number, dataset in enumerate(self.opened) for place in dataset.find(name)]
        if not found:
            raise InputError(
                f"no source has a sample with the key or the id '{name}'; both are in the ledger and in refs, keys "
                f"also in the tars, ids in the data that they were made of"
            )
        return found

    def draw(self, refs: Sequence[Ref]) -> list[Drawn]:
        """Look samples up."""
        found: dict[Ref, Drawn] = {}
        for number in {ref.source for ref in refs}:
            own = [ref for ref in refs if ref.source == number]
            with self.lock:
                drawn = self.opened[number].draw_many([ref.shard for ref in own], [ref.row for ref in own])
            found.update(zip(own, drawn, strict=True))
        return [found[ref] for ref in refs]

    def tables(self, refs: Sequence[Ref], drawn: Sequence[Drawn]) -> list[Future[bytes | None]]:
        """Begin to read the tables of samples' clips: None where they are not there, or not as the index says."""
        found: dict[int, Future[bytes | None]] = {}
        for number in {ref.source for ref in refs}:
            own = [place for place, ref in enumerate(refs) if ref.source == number]
            places = [table for place in own if (table := drawn[place].table) is not None]
            found.update(zip(own, self.opened[number].tables(places), strict=True))
        return [found[place] for place in range(len(refs))]

    def text_part(self, source: int, drawn: Drawn, key: str) -> tuple[Span, ...]:
        """Return where the tokens of a sample's text are kept beside the index, if they are those of a key."""
        if drawn.text is None:
            return ()
        dataset = self.opened[source]
        counted = dataset.manifest.tokens
        kept = kept_text_key(counted.template_sha256, counted.library)
        if kept != key:
            if dataset.root not in self._told_text:
                self._told_text.add(dataset.root)
                logger.info(
                    "the text that was tokenised beside the indexes of %s is of another tokenizer, template or release "
                    "(%s, not %s), so samples are tokenised in training, to the same result",
                    dataset.root,
                    shorten(kept),
                    key,
                )
            return ()
        offset, size, crc32c = drawn.text
        return (Span(dataset.root, texts_name(drawn.span.path, key), offset, size, crc32c, (("", offset, size),)),)


def _is_measured(geometry: dict[str, Any]) -> bool:
    """Tell by the JSON of a geometry, whose rules may be another version's."""
    return any(isinstance(rule, dict) and rule.get("rule") == "Measured" for rule in geometry.values())


def _drawn_entries(source: SourceOptions, dataset: OpenDataset) -> list[str]:
    """Return the entries of a dataset that have a weight above 0; none where none are weighed."""
    if not source.weights:
        return []
    known = dataset.manifest.shards.entries
    for entry in source.weights:
        if entry not in known:
            raise ConfigError(f"the dataset at {source.url} has no entry '{entry}'; {nearest_name(entry, list(known))}")
    if unnamed := [entry for entry in known if entry not in source.weights]:
        raise ConfigError(
            f"the weights of {source.url} do not name {', '.join(map(repr, unnamed))}, so it is not known how often to "
            f"draw from {'it' if len(unnamed) == 1 else 'them'}; name all entries, with the weight 0 to leave one out"
        )
    if left_out := [entry for entry in source.weights if not source.weights[entry]]:
        num_samples = sum(sum(known[entry]) for entry in left_out)
        logger.warning(
            "%s of %s have the weight 0: their %d samples are left out", ", ".join(left_out), source.url, num_samples
        )
    return [entry for entry in known if source.weights[entry]]
