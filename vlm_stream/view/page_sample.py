"""The sample page: a chat with media in place, the prompt with labels coloured, counts, members, neighbours.

The same body is the page of a server, one file, and what a notebook shows.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from vlm_stream.format import medium_of
from vlm_stream.schema import human_bytes
from vlm_stream.view.frame import note
from vlm_stream.view.html import Html, join, link, table, tag
from vlm_stream.view.pictures import type_of
from vlm_stream.view.sample import Medium

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vlm_stream.view.frame import Links
    from vlm_stream.view.sample import Prompt, Run, Sample, Turn

_MAX_TOKENS: Final = 4000
"""Tokens that are shown one by one."""
_MAX_RUN: Final = 20_000
"""Characters of one run of the prompt."""


def sample_body(sample: Sample, links: Links, neighbours: Html | None = None) -> Html:
    """Return everything that is known of one sample."""
    source, shard, key = sample.name
    title = sample.id or key
    return join(
        tag("p", link(source, links.page("/dataset", source=source)), f" / {shard} / {key}", class_="crumbs"),
        tag("h1", title),
        neighbours,
        note(f"A run leaves this sample out. {sample.problem}", bad=True) if sample.problem else None,
        tag(
            "div",
            tag(
                "div",
                tag("h2", "Conversation"),
                *(_turn(turn, sample, links) for turn in sample.turns),
                None if sample.turns else note("Its members make no conversation; they are listed below."),
            ),
            tag("div", _prompt(sample), _counts(sample)),
            class_="two",
        ),
        tag("div", _named(sample, links), _members(sample, links), class_="two facts"),
    )


def _turn(turn: Turn, sample: Sample, links: Links) -> Html:
    known = turn.role if turn.role in ("system", "user", "assistant") else "user"
    trained = "learned" if turn.is_trained else "not learned" if turn.role == "assistant" else ""
    parts = (_medium(part, sample, links) if isinstance(part, Medium) else tag("p", part) for part in turn.parts)
    return tag(
        "section",
        tag("header", tag("b", turn.role), tag("span", trained, class_="good" if turn.is_trained else "soft")),
        *parts,
        class_=f"bubble {known}" + (" trained" if turn.is_trained else ""),
    )


def _medium(medium: Medium, sample: Sample, links: Links) -> Html:
    says = [", ".join(medium.members[:1]) + (f" and {len(medium.members) - 1} more" if len(medium.members) > 1 else "")]
    says.append(medium.says)
    if medium.resized is not None:
        cell = medium.resized.patch_size * medium.resized.merge_size
        says.append(
            f"the model sees {medium.resized.width} x {medium.resized.height}, a token for each {cell} x {cell} square"
        )
    if medium.tokens is not None:
        says.append(f"{medium.tokens:,} tokens")
    caption = tag("figcaption", " · ".join(says))
    if medium.kind == "image":
        picture = tag("img", src=links.picture(sample, medium), alt=medium.members[0], loading="lazy")
        original = links.member(sample, medium.members[0])
        return tag("figure", picture if original is None else tag("a", picture, href=original), caption, class_="image")
    if medium.kind == "audio":
        source = links.member(sample, medium.members[0]) if type_of(medium.members[0]) else None
        player = tag("audio", controls=True, preload="none", src=source) if source else None
        return tag("figure", player, caption)
    return tag("figure", _clip(medium, sample, links), _frames(medium, sample, links), caption)


def _clip(medium: Medium, sample: Sample, links: Links) -> Html | None:
    if len(medium.members) > 1 or type_of(medium.members[0]) is None:  # the strip of frames shows it
        return None
    source = links.member(sample, medium.members[0])
    return None if source is None else tag("video", controls=True, preload="metadata", src=source)


def _frames(medium: Medium, sample: Sample, links: Links) -> Html:
    shown = []
    for place, (index, seconds) in enumerate(medium.frames):
        at = f"frame {index}" if seconds is None else f"{seconds:.2f} s"
        picture = tag("img", src=links.frame(sample, medium, place), alt=f"frame {index}", loading="lazy")
        shown.append(tag("span", picture, at))
    left = medium.num_frames - len(medium.frames)
    if left > 0:
        shown.append(tag("span", f"{left} more"))
    return tag("div", *shown, class_="frames", tabindex=0, role="group", aria_label="the frames that the model gets")


def _prompt(sample: Sample) -> Html:
    if sample.prompt is None:
        return join(tag("h2", "Prompt"), tag("p", f"There is none to show: {sample.why_no_prompt}.", class_="soft"))
    return join(tag("h2", "What the model reads"), prompt_body(sample.prompt))


def prompt_body(prompt: Prompt) -> Html:
    """Return a rendered prompt: what is learned coloured, media as counts, and its tokens on demand."""
    legend = tag(
        "div",
        tag("span", tag("i", class_="label"), f"learned, {prompt.num_labels:,} tokens"),
        tag("span", tag("i", class_="media"), "media"),
        tag("span", tag("i", class_="plain"), f"read only; {prompt.num_tokens:,} tokens in all"),
        class_="legend",
    )
    tokens = list(_tokens(prompt))
    cut = prompt.num_tokens - _MAX_TOKENS
    more = tag("p", f"… and {cut:,} more tokens", class_="soft") if cut > 0 else None
    return join(
        legend,
        tag("div", tag("pre", *map(_run, prompt.runs)), class_="prompt"),
        tag(
            "details",
            tag("summary", f"Token by token ({prompt.num_tokens:,})"),
            tag("div", *tokens, class_="tokens mono"),
            more,
            class_="by-token",
        ),
    )


def _run(run: Run) -> Html | str:
    text = run.text if len(run.text) <= _MAX_RUN else f"{run.text[:_MAX_RUN]}… ({len(run.text) - _MAX_RUN:,} more)"
    if run.kind == "label":
        return tag("mark", text)
    if run.kind == "media":
        names: dict[str, int] = {}
        for _, name in run.tokens:
            names[name] = names.get(name, 0) + 1
        return tag(
            "mark",
            " ".join(f"{name} x {count}" if count > 1 else name for name, count in names.items()),
            class_="media",
        )
    return text


def _tokens(prompt: Prompt) -> Iterator[Html]:
    shown = 0
    for run in prompt.runs:
        alike = groupby(run.tokens) if run.kind == "media" else ((token, (token,)) for token in run.tokens)
        for (number, text), same in alike:
            if shown >= _MAX_TOKENS:
                return
            count = sum(1 for _ in same)
            shown += count
            visible = text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"
            many = f" x {count:,}" if count > 1 else ""
            yield tag("span", visible + many, title=f"{number}", class_=run.kind if run.kind != "text" else None)


def _counts(sample: Sample) -> Html:
    prompt = sample.prompt
    rows: list[list[Any]] = [
        ["tokens", f"{sample.tokens:,}", _compared(sample.tokens, prompt.num_tokens if prompt else None)],
        [
            "labels",
            f"{sample.labels:,}" if sample.labels >= 0 else "not counted",
            _compared(sample.labels, prompt.num_labels if prompt else None),
        ],
        ["text", f"{sample.text_tokens:,}", ""],
    ]
    return tag("div", tag("h3", "Counts"), table(["", "index", "encoded"], rows), class_="panel numbers counts")


def _named(sample: Sample, links: Links) -> Html:
    facts = {
        "source": sample.name.source,
        "entry": sample.entry,
        "own id": sample.id or "none",
        "shard": sample.name.shard,
        "key": sample.name.key,
        "bytes": f"{human_bytes(sample.size)} at {sample.offset:,}",
        "place": f"{sample.place + 1:,}",
    }
    here, there = links.sample(sample.name), links.page("/step", key=sample.name.key)
    return tag(
        "div",
        tag("h3", "Name"),
        table(["", ""], ([name, value] for name, value in facts.items())),
        tag("p", link("permanent link", here), " · ", link("where in the run", there)) if here else None,
        class_="panel",
    )


def _compared(counted: int, encoded: int | None) -> Html | str:
    if encoded is None:
        return "not known"
    if counted == encoded:
        return tag("span", f"{encoded:,} ✓", class_="good")
    return tag("span", f"{encoded:,} ✗" if counted >= 0 else f"{encoded:,}", class_="wrong" if counted >= 0 else None)


def _members(sample: Sample, links: Links) -> Html:
    rows = [
        [link(name, links.member(sample, name)), medium_of(name) or "", human_bytes(size)]
        for name, _, size in sample.members
    ]
    raw = [tag("details", tag("summary", name), tag("pre", text)) for name, text in sample.texts]
    return tag("div", tag("h3", "Members"), table(["name", "kind", "bytes"], rows), *raw, class_="panel")
