"""Tells whose code a file or a frame holds: one rule for lines in messages, in findings and in a profiler's stacks."""

import os
import re
import sys
from collections.abc import Iterator
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePath
from types import FrameType

_STANDARD_LIBRARY = re.compile(r"(^|/)lib/python3[^/]*/")
#: Folders of installed packages, whose paths a profiler gives in full where they are not on ``sys.path``.
_INSTALLED = ("site-packages", "dist-packages")
_TORCH = {"torch", "torchgen", "functorch", "triton"}
#: Where torch lies, be it built in a clone; found without importing it.
_TORCH_FOLDER = Path(str(getattr(find_spec("torch"), "origin", "torch/."))).parent
#: Packages whose paths a profiler shortens, as it does with all that is on ``sys.path``: nobody's own code.
_PACKAGES = {
    *("torchvision", "torchaudio", "timm", "auxhead", "numpy", "transformers", "accelerate"),
    *("lightning", "pytorch_lightning", "tqdm", "pytest", "_pytest", "pluggy"),
    *("IPython", "ipykernel", "typer", "click", "rich"),
}
#: Cells of notebooks, and what is typed: the only code without a file that is the user's, beside that of ``python -c``.
_TYPED = ("<ipython-input", "<stdin>")
#: Where this package's rooms lie, installed or in a clone.
_OWN = Path(__file__).resolve().parents[2]
#: What there is to be looked at as anybody's code.
_SHOWN = (("model", "examples"), ("model", "guides"))


class Owner(Enum):
    """Whose code a file holds."""

    USER = "the user's"
    PACKAGE = "another installed package's"
    TORCH = "torch's or Triton's"
    STANDARD = "the standard library's, or made by Python or torch"
    AUXHEAD = "auxhead's kernels' or model's"
    TOOLS = "auxhead's autotune's or plots'"


_ROOMS = {"kernels": Owner.AUXHEAD, "model": Owner.AUXHEAD, "autotune": Owner.TOOLS, "plots": Owner.TOOLS}


@cache
def owner(file: str, function: str = "") -> Owner:
    """Return whose code a file holds, by its path in full, or as a profiler shortens it to what is on ``sys.path``."""
    if file.startswith("<"):
        return Owner.USER if file.startswith(_TYPED) else Owner.STANDARD
    path = PurePath(file)
    parts = path.parts
    if room := _own_place(path):
        return Owner.USER if room[:2] in _SHOWN else _ROOMS[room[0]]
    folder = next((part for part in _INSTALLED if part in parts), None)
    top = parts[0] if folder is None else parts[parts.index(folder) + 1]
    if top in _TORCH or path.is_relative_to(_TORCH_FOLDER):
        return Owner.TORCH
    if folder is not None or top in _PACKAGES:
        return Owner.PACKAGE
    if _STANDARD_LIBRARY.search(file):
        return Owner.STANDARD
    if not path.is_absolute() and top.removesuffix(".py") in sys.stdlib_module_names and function != "<module>":
        return Owner.STANDARD  # a script may be called so; modules of the library were imported before
    return Owner.USER


def _own_place(path: PurePath) -> tuple[str, ...]:
    """Return a file's place in this package, by its folder's name where it is another machine's; () if it has none."""
    parts = path.parts
    if path.is_relative_to(_OWN):
        parts = path.relative_to(_OWN).parts
    elif "auxhead" in parts:
        parts = parts[parts.index("auxhead") + 1 :]
    elif path.is_absolute() or not (_OWN / path).is_file():
        return ()
    return parts if parts and parts[0] in _ROOMS else ()


def owner_of(frame: FrameType) -> Owner:
    """Return whose code a frame runs: its path is relative to the current directory, as that of a script is."""
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    if file == "<string>" and frame.f_globals.get("__name__") == "__main__" and not name.startswith("__"):
        return Owner.USER  # of python -c; methods that dataclasses have are made of such strings, too
    return owner(file if file.startswith("<") else os.path.abspath(file))


def frames_from(frame: FrameType | None, outermost: FrameType | None = None) -> Iterator[tuple[FrameType, Owner]]:
    """Yield the frames of a stack, the innermost first, each with whose it is, until ``outermost`` was yielded."""
    while frame is not None:
        yield frame, owner_of(frame)
        frame = None if frame is outermost else frame.f_back


def line_of(frame: FrameType) -> str:
    """Return where a frame is: ``file.py:12``."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
