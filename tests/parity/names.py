"""The modules of NeMo Automodel that are compared, and their public names."""

from importlib import import_module

ROOT = "nemo_automodel.components.datasets."
CHECKED = ("check_packing", "check_pp_media", "check_rows", "check_conversations")


def load() -> None:
    """Register all checks."""
    for name in CHECKED:
        import_module(f"tests.parity.{name}")
