"""What NeMo Automodel 0.7.0 takes for granted and a CPU build of torch has not: a current CUDA device.

Two names are replaced, and nothing else of the recipe: `torch.cuda.reset_peak_memory_stats` (called by `setup` and at
every log line), and `torch` as `nemo_automodel._transformers.auto_model` sees it (which asks for the current CUDA
device and moves the model there).
"""

import types

import torch


class _TorchWithoutCuda(types.ModuleType):
    cuda = types.SimpleNamespace(current_device=lambda: torch.device("cpu"))

    @staticmethod
    def device(*_):
        return torch.device("cpu")

    def __getattr__(self, name):
        return getattr(torch, name)


def install():
    from nemo_automodel._transformers import auto_model

    torch.cuda.reset_peak_memory_stats = lambda *_: None
    auto_model.torch = _TorchWithoutCuda("torch")
