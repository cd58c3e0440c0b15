"""Samples and steps in a terminal: coloured text, and pictures where the terminal shows them.

Enters: the values that pages show. Leaves: text on a console. Text of datasets is hostile here too: control characters,
with which it could rewrite the screen, are replaced.
"""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from vlm_stream.errors import BadSampleError, InputError, clean
from vlm_stream.schema import human_bytes
from vlm_stream.view.pictures import half_blocks
from vlm_stream.view.sample import Medium

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console
    from rich.text import Text

    from vlm_stream.view.rows import Row, StepView
    from vlm_stream.view.sample import Prompt, Sample
    from vlm_stream.view.viewer import Viewer

Pictures: TypeAlias = Literal["kitty", "iterm", "blocks", "none"]
"""How a terminal shows pictures."""
_COLUMNS: Final = 48
_FRAMES: Final = 4
_CHUNK: Final = 4096
_COLOURS: Final = {"text": "#4f80cf", "vision": "#e58e2c", "label": "#1f8a4c", "hole": "#c2333d", "pad": "#5d6779"}


def choose_pictures(environment: Mapping[str, str], *, is_terminal: bool) -> Pictures:
    """Return how a terminal shows pictures, by what it says of itself.

    >>> choose_pictures({"TERM": "xterm-kitty"}, is_terminal=True), choose_pictures({}, is_terminal=False)
    ('kitty', 'none')
    """
    if not is_terminal:
        return "none"
    if environment.get("TERM") in ("xterm-kitty", "xterm-ghostty") or "KITTY_WINDOW_ID" in environment:
        return "kitty"
    if environment.get("TERM_PROGRAM") in ("iTerm.app", "WezTerm") or environment.get("LC_TERMINAL") == "iTerm2":
        return "iterm"
    return "blocks"


def print_sample(console: Console, viewer: Viewer, sample: Sample, pictures: Pictures) -> None:
    """Print one sample: the chat with its media, the prompt, counts and members."""
    from rich.rule import Rule

    console.print(Rule(clean(" / ".join(sample.name)), style="bold"))
    if sample.problem:
        console.print(_text(f"A run leaves this sample out. {sample.problem}", "bold red"))
    for turn in sample.turns:
        style = "bold green" if turn.is_trained else "bold"
        console.print(_text(f"\n{turn.role}{' (learned)' if turn.is_trained else ''}", style))
        for part in turn.parts:
            if isinstance(part, Medium):
                _print_medium(console, viewer, sample, part, pictures)
            else:
                console.print(_text(part))
    if sample.prompt is not None:
        console.print(Rule("prompt; green is learned", style="dim"))
        console.print(_prompt(sample.prompt))
    encoded = f", encoded {sample.prompt.num_tokens:,}" if sample.prompt else ""
    labels = "labels not counted" if sample.labels < 0 else f"{sample.labels:,} labels"
    console.print(_text(f"\nindex {sample.tokens:,} tokens{encoded}; {labels}", "dim"))
    members = ", ".join(f"{name} {human_bytes(size)}" for name, _, size in sample.members)
    console.print(_text(f"members: {members}", "dim"))


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(clean(text), style=style)


def _prompt(prompt: Prompt) -> Text:
    from rich.text import Text

    found = Text()
    for run in prompt.runs:
        shown = f"[{len(run.tokens)} media tokens]" if run.kind == "media" else clean(run.text)
        found.append(shown, style={"label": "green", "media": "yellow"}.get(run.kind, ""))
    return found


def _print_medium(console: Console, viewer: Viewer, sample: Sample, medium: Medium, pictures: Pictures) -> None:
    tokens = "" if medium.tokens is None else f", {medium.tokens:,} tokens"
    console.print(_text(f"[{medium.kind} {', '.join(medium.members[:2])}: {medium.says}{tokens}]", "yellow"))
    if pictures == "none" or medium.kind == "audio":
        return
    try:
        if medium.kind == "image":
            shown = [viewer.samples.picture(sample.ref, medium.number)]
        else:
            shown = viewer.frames_of(sample.ref, medium.number)[:_FRAMES]
    except (BadSampleError, InputError) as error:
        console.print(_text(f"no picture: {error}", "red"))
        return
    for data in shown:
        _print_picture(console, data, pictures)


def _print_picture(console: Console, data: bytes, pictures: Pictures) -> None:
    from PIL import Image

    picture = Image.open(io.BytesIO(data))
    if pictures == "blocks":
        from rich.text import Text

        line = Text()
        for row in half_blocks(picture, min(_COLUMNS, max(console.width - 2, 8))):
            for upper, lower in row:
                line.append("▀", style=f"{_hex(upper)} on {_hex(lower)}")
            line.append("\n")
        console.print(line, end="")
        return
    console.file.flush()
    console.file.write(_as_kitty(picture) if pictures == "kitty" else _as_iterm(data))
    console.file.write("\n")


def _hex(colour: Any) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


def _as_kitty(picture: Any) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    text = base64.b64encode(buffer.getvalue()).decode()
    chunks = [text[at : at + _CHUNK] for at in range(0, len(text), _CHUNK)]
    parts = []
    for place, chunk in enumerate(chunks):
        first = f"f=100,a=T,c={_COLUMNS}," if place == 0 else ""
        parts.append(f"\033_G{first}m={int(place + 1 < len(chunks))};{chunk}\033\\")
    return "".join(parts)


def _as_iterm(data: bytes) -> str:
    text = base64.b64encode(data).decode()
    return f"\033]1337;File=inline=1;width={_COLUMNS};size={len(data)}:{text}\a"


def print_step(console: Console, view: StepView) -> None:
    """Print what one rank gets at one step: rows as strips, and the names of their samples."""
    from rich.table import Table

    rows = [row for micro in view.micro_batches for row in micro]
    console.print(
        f"step {view.number}, rank {view.rank} of {len(view.llm)}: {sum(row.tokens for row in rows):,} tokens, "
        f"{view.fill:.1%} full"
    )
    for micro, members in enumerate(view.micro_batches):
        for place, row in enumerate(members):
            console.print(_text(f"micro-batch {micro}, row {place}: {row.tokens:,} of {row.slots:,} tokens", "dim"))
            console.print(_strip(row, max(console.width - 2, 20)))
    legend = _text("")
    kinds = {"text": "text", "vision": "images and videos"}
    if view.bad is not None:
        kinds |= {"label": "learned", "hole": "hole: a bad sample"}
    for kind, name in (kinds | {"pad": "padding"}).items():
        legend.append("█ ", style=_COLOURS[kind])
        legend.append(f"{name}   ")
    console.print(legend)
    names = Table("row", "source", "shard", "key", "id", "tokens", "vision", box=None)
    for place, row in enumerate(rows):
        for each in row.documents:
            cells = [str(place), *each.name, each.id or "", f"{each.tokens:,}", f"{each.vision:,}"]
            names.add_row(*(_text(cell) for cell in cells))
    console.print(names)
    for line in view.bad or ():
        console.print(
            _text(f"{line.stage}: {line.reason}: {line.source} / {line.shard} / {line.sample}: {line.detail}", "red")
        )
    for reason, each in view.dropped:
        console.print(_text(f"left out by the plan, {reason}: {' / '.join(each.name)}", "red"))


def _strip(row: Row, width: int) -> Text:
    """Return a row as so many blocks, coloured by what stands in the middle of each."""
    from rich.text import Text

    borders: list[tuple[int, str]] = []
    at = 0
    for kind, length in row.runs:
        at += length
        borders.append((at, kind))
    for each in row.documents:
        if row.runs and not each.hole:
            continue
        vision = 0 if each.hole else min(each.vision, each.tokens)
        borders += [(at + vision, "vision"), (at + each.tokens, "hole" if each.hole else "text")]
        at += each.tokens
    line = Text()
    for column in range(width):
        middle = (column + 0.5) * row.slots / width
        kind = next((kind for end, kind in borders if middle < end), "pad")
        line.append("█" if kind != "pad" else "░", style=_COLOURS[kind])
    return line
