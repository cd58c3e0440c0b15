"""Datasets and options -> a planner: what the stream, the dry run and the queries share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vlm_stream.errors import ConfigError
from vlm_stream.plan import Planner
from vlm_stream.processors import template_digest
from vlm_stream.stream.counting import apply_frame_options, count_fake_image
from vlm_stream.stream.datasets import OpenDatasets, open_manifests
from vlm_stream.tokens import Geometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vlm_stream.format import OpenDataset
    from vlm_stream.stream.options import StreamOptions
    from vlm_stream.stream.sources import SourceOptions

__all__ = ["open_planner"]


def open_planner(
    sources: Sequence[SourceOptions], options: StreamOptions, processor: Any = None, *, epochs_before: int = 0
) -> tuple[OpenDatasets, Planner, Geometry]:
    """Open the datasets and plan over them.

    Args:
        sources: The datasets.
        options: How samples become batches.
        processor: Counts media; None: the geometry that the datasets were counted with.
        epochs_before: Epochs of earlier iterations, which come on top of `options.epochs`.
    """
    opened = open_manifests(sources, options.store)
    geometry = Geometry.from_processor(processor) if processor is not None else _stored_geometry(opened)
    geometry = apply_frame_options(geometry, options)
    fake_tokens = 0
    if options.fake_image:
        if processor is None:
            raise ConfigError(
                "fake_image lengthens text-only samples by what the processor writes for an image, and no processor "
                "was given; name one with --processor"
            )
        fake_tokens = count_fake_image(processor, geometry)
    text = "" if processor is None else template_digest(processor)
    # Where lengths are guesses, nobody knows which samples will be cut.
    are_labels_known = geometry.is_exact or options.long_samples != "truncate"
    datasets = OpenDatasets(
        sources,
        opened,
        geometry,
        fake_tokens=fake_tokens,
        text=text if are_labels_known else "",
    )
    config = options.plan(
        f"{datasets.geometry_digest}+{fake_tokens}",
        text=text,
        epochs_before=epochs_before,
        weights_given=any(source.has_weight for source in sources),
    )
    planner = Planner(datasets.specs(weigh_by=config.mixture.weigh_by), datasets, config, allow=options.allow)
    return datasets, planner, geometry


def _stored_geometry(opened: Sequence[OpenDataset]) -> Geometry:
    found: list[Geometry] = []
    for dataset in opened:
        geometry = dataset.manifest.geometry
        if geometry not in found:
            found.append(geometry)
    if len(found) > 1:
        raise ConfigError(
            f"the sources were counted for different processors ({', '.join(g.family for g in found)}), so "
            f"their lengths do not compare; name the one that trains with --processor"
        )
    return found[0]
