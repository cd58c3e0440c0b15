"""How processors turn media sizes into tokens: one small frozen class per kind of rule, all vectorised, numpy only.

Files:
    base.py      `MediaCounts`, the protocols, the guess
    grids.py     sides rounded to patches within pixel limits: Qwen2-VL to Qwen3-VL, Qwen3-Omni, GLM-4.6V
    budgets.py   scaled into a budget: Kimi-K2.5, Gemma-4, Nemotron-H-Omni
    pieces.py    cut into views, tiles or crops: Gemma-3, InternVL, Phi-4, LLaVA-OneVision, SmolVLM, Step-3.7
    audio.py     samples to frames to tokens
"""
