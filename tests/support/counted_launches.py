"""Which calls of an operator get as far as its kernel."""

import importlib
from types import SimpleNamespace

import pytest


def counted_launches(monkeypatch: pytest.MonkeyPatch, name: str) -> list:
    """Note the grid of each launch of the kernel of ``auxhead.kernels.<name>``, in a list that is returned."""
    module = importlib.import_module(f"auxhead.kernels.{name}")
    seen: list = []
    kernel = getattr(module.kernel, f"{name}_kernel")

    class Counted:
        def __getitem__(self, grid):
            seen.append(grid)
            return kernel[grid]

    monkeypatch.setattr(module, "kernel", SimpleNamespace(**{f"{name}_kernel": Counted()}))
    return seen
