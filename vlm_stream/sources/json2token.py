"""Structured ground truth -> the token sequence that document parsers are trained on."""

from __future__ import annotations

from typing import Any

__all__ = ["json2token"]


def json2token(value: Any, sort_json_key: bool = True) -> str:
    """Write dicts as `<s_key>...</s_key>`, lists with `<sep/>` between their entries, everything else as text.

    >>> json2token({"b": 2, "a": [{"x": 1}, {"y": "z"}]})
    '<s_b>2</s_b><s_a><s_x>1</s_x><sep/><s_y>z</s_y></s_a>'
    """
    if isinstance(value, dict):
        if value.keys() == {"text_sequence"}:
            return str(value["text_sequence"])
        keys = sorted(value, reverse=True) if sort_json_key else list(value)
        return "".join(f"<s_{key}>{json2token(value[key], sort_json_key)}</s_{key}>" for key in keys)
    if isinstance(value, list):
        return "<sep/>".join(json2token(entry, sort_json_key) for entry in value)
    return str(value)
