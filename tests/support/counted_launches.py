"""Which calls of an operator get as far as its kernel."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest


class Counted:
    """A kernel of which each launch's grid is noted in a list."""

    def __init__(self, kernel: Any, seen: list) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.seen.append(grid)
        return self.kernel[grid]


def counted_launches(monkeypatch: pytest.MonkeyPatch, *names: str, of: str = "") -> list:
    """Note launches of kernels of ``auxhead.kernels.<of>``, or of the module of the first name; returns the grids."""
    module = importlib.import_module(f"auxhead.kernels.{of or names[0]}")
    seen: list = []
    kernels = {f"{name}_kernel": Counted(getattr(module.kernel, f"{name}_kernel"), seen) for name in names}
    monkeypatch.setattr(module, "kernel", SimpleNamespace(**kernels))
    return seen
