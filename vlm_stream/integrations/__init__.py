"""Integrations: plugs for trainers, one module for each, which imports its trainer's package; this one imports nothing.

Enters: a `StreamLoader` and a trainer. Leaves: the trainer, told what it cannot know by itself (lengths, label counts,
the position in the data), and a sentence where it would cut, repeat or ignore something.

Files: `torch.py`, `accelerate.py`, `lightning.py`, `transformers.py` and `trl.py` on it, `automodel.py`;
`trainer_checks.py` is what they share.
"""
