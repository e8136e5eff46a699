"""Tells whose code a frame of a stack is, and finds the innermost line that is the user's own."""

import functools
import os
from enum import Enum
from pathlib import Path
from types import FrameType

import torch

_ROOT = Path(__file__).parents[3]
_SITE = Path(torch.__file__).parents[1]


class Owner(Enum):
    """Whose code a file holds."""

    USER = "the user's, or of another package"
    TORCH = "torch, Triton"
    STANDARD = "the standard library"
    AUXHEAD = "auxhead's kernels and model"
    TOOLS = "auxhead's autotune and plots"


_FOLDERS = {
    # there to be looked at as anybody's code; folders in folders come first
    **{str(_ROOT / "model" / name) + os.sep: Owner.USER for name in ("guides", "examples")},
    **{str(_ROOT / name) + os.sep: Owner.AUXHEAD for name in ("kernels", "model")},
    **{str(_ROOT / name) + os.sep: Owner.TOOLS for name in ("autotune", "plots")},
    **{str(_SITE / name) + os.sep: Owner.TORCH for name in ("torch", "triton", "torchgen", "functorch")},
}
_STANDARD = os.path.dirname(os.__file__) + os.sep
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
#: Code that Python or torch makes itself.
_GENERATED = ("<frozen ", "<eval_with_key>", "<__array_function__")
#: What calls the methods of streams and events for their user: ``wait_event`` calls ``event.wait``.
_STREAMS = str(_SITE / "torch" / "cuda" / "streams.py")


@functools.cache
def owner(file: str) -> Owner:
    """Return whose code a file holds, by its path as code objects have it."""
    for folder, whose in _FOLDERS.items():
        if file.startswith(folder):
            return whose
    if file.startswith(_GENERATED):
        return Owner.STANDARD
    if file.startswith(_STANDARD) and not any(name in file for name in _PACKAGES):
        return Owner.STANDARD
    return Owner.USER


def user_line(frame: FrameType | None, outermost: FrameType | None = None) -> str | None:
    """Return the innermost line of a stack that is neither torch's, autotune's nor the standard library's.

    The look-up ends with the frame ``outermost``. None: there is no such line.
    """
    while frame is not None:
        if owner(frame.f_code.co_filename) in (Owner.USER, Owner.AUXHEAD):
            return _line(frame)
        if frame is outermost:
            return None
        frame = frame.f_back
    return None


def calling_line(frame: FrameType | None) -> str | None:
    """Return the line that calls a method of a stream or an event, if the user's own code does so itself.

    None: torch or auxhead calls it.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file != _STREAMS and owner(file) is not Owner.STANDARD:
            return _line(frame) if owner(file) is Owner.USER else None
        frame = frame.f_back
    return None


def _line(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
