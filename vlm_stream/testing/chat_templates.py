"""Chat templates in the manner of the published ones: enters what a family writes, leaves a Jinja text.

transformers compiles templates with `trim_blocks` and `lstrip_blocks`, so newlines stand inside expressions here.
With `generation_tags=True` the assistant's answer and its end token lie inside `{% generation %}`, from which
transformers derives the mask of assistant tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ChatStyle", "write_template"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatStyle:
    """What a family writes around turns and in the place of media (Jinja fragments; newlines as written)."""

    turn_begin: str
    """Opens a turn; `role` is in scope."""
    turn_end: str
    """Closes a turn; the assistant's counts as generated."""
    after_turn: str = ""
    """Stands between turns and is never generated."""
    generation_prompt: str = ""
    """Asks for an answer."""
    begin: str = ""
    """Stands before the first turn."""
    default_system: str = ""
    """A whole turn that is written when the conversation does not begin with a system turn."""
    image: str = ""
    """Stands for an image."""
    video: str = ""
    """Stands for a video."""
    audio: str = ""
    """Stands for an audio clip."""
    assistant_name: str = "assistant"
    """What the family calls the assistant's role."""


def _literal(text: str) -> str:
    return text.replace("\n", "{{ '\\n' }}")


def write_template(style: ChatStyle, *, generation_tags: bool = False) -> str:
    """Write the template of a style.

    >>> style = ChatStyle(turn_begin="[{{ role }}]", turn_end="[/]", image="<image>")
    >>> "<image>" in write_template(style)
    True
    """
    content = (
        "{% macro show(content) %}"
        "{% if content is string %}{{ content }}"
        "{% else %}{% for item in content %}"
        f"{{% if item['type'] == 'image' %}}{_literal(style.image)}"
        f"{{% elif item['type'] == 'video' %}}{_literal(style.video)}"
        f"{{% elif item['type'] == 'audio' %}}{_literal(style.audio)}"
        "{% elif item['type'] == 'text' %}{{ item['text'] }}{% endif %}"
        "{% endfor %}{% endif %}"
        "{% endmacro %}"
    )
    system = ""
    if style.default_system:
        system = (
            "{% if messages and messages[0]['role'] != 'system' %}" + _literal(style.default_system) + "{% endif %}"
        )
    turn = "{{ show(message['content']) }}" + _literal(style.turn_end)
    if generation_tags:
        turn = (
            "{% if message['role'] == 'assistant' %}"
            f"{{% generation %}}{turn}{{% endgeneration %}}"
            f"{{% else %}}{turn}{{% endif %}}"
        )
    role = f"{{% set role = '{style.assistant_name}' if message['role'] == 'assistant' else message['role'] %}}"
    turns = (
        "{% for message in messages %}"
        + role
        + _literal(style.turn_begin)
        + turn
        + _literal(style.after_turn)
        + "{% endfor %}"
    )
    prompt = "{% if add_generation_prompt %}" + _literal(style.generation_prompt) + "{% endif %}"
    return content + _literal(style.begin) + system + turns + prompt
