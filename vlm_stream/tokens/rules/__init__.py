"""How processors turn media sizes into tokens: one small frozen class per kind of rule, all vectorised, numpy only.

Enter heights, widths and numbers of frames as int64 arrays; leave `MediaCounts`. A rule holds the numbers of one
processor's config and nothing else, so it can be written as JSON. It knows neither text nor transformers.

Files:
    base.py            `MediaCounts`, the protocols
    patch_grid.py      sides rounded to patches within pixel limits: Qwen2-VL to Qwen3-VL, Qwen3-Omni, GLM-4.6V
    navit.py           scaled down and padded to patches: Kimi-K2.5
    soft_budget.py     as large as a budget of soft tokens allows: Gemma-4
    patch_budget.py    a patch grid inside a budget: Nemotron-H-Omni
    fixed.py           the same number for every image or frame: Gemma-3, and the videos of InternVL, SmolVLM, LLaVA
    tiles.py           the tile grid nearest in shape: InternVL, Phi-4-multimodal
    anyres.py          tiles without their padding: LLaVA-OneVision
    crops.py           rows of crops: SmolVLM, Step-3.7
    audio.py           samples to frames to tokens
    registry.py        rules by name: how they travel as JSON
"""
