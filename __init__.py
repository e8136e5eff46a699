"""auxhead: early-exit heads that cost next to nothing on a GPU. Its front doors by their short names.

Installed, this file is ``auxhead/__init__.py``. Names are those of :mod:`auxhead.model`, loaded when they are used.

Example:
    >>> import auxhead
    >>> network = auxhead.attach(torchvision.models.resnet18(), example_input=torch.randn(2, 3, 64, 64))
"""

from importlib import import_module
from typing import Any

_PACKAGES = ("autotune", "kernels", "model", "plots")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    model = import_module(".model", __name__)
    if name not in ("__all__", "__version__", *model.__all__):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(model, name)


def __dir__() -> list[str]:
    model = import_module(".model", __name__)
    return sorted({*globals(), *model.__all__, *_PACKAGES, "__version__"})
