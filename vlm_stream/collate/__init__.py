"""Collate: samples become the batch that one model family takes."""

from __future__ import annotations

from vlm_stream.collate.packed import neat_packed_vlm_collater

__all__ = ["neat_packed_vlm_collater"]
