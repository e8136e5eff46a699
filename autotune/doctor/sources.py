"""Tells whose code a function or a line is: the one rule for frames of stacks, and for a profiler's events."""

import re
import sys
from enum import Enum
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePath
from types import FrameType

_FUNCTION = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)")
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
#: Cells of notebooks, and what is typed: the only code without a file that is the user's.
_TYPED = ("<ipython-input", "<stdin>")
#: Where this package's rooms lie, installed or in a clone.
_OWN = Path(__file__).resolve().parents[2]
#: What there is to be looked at as anybody's code.
_SHOWN = (("model", "examples"), ("model", "guides"))
#: What calls the methods of streams and events for their user: ``wait_event`` calls ``event.wait``.
_STREAMS = str(Path("torch", "cuda", "streams.py"))


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


@cache
def user_line(name: str) -> str | None:
    """Return ``file.py:12 in forward`` for a function of the user's own, by its event's name; None for any other's.

    Names are ``file.py(12): forward``, and 12 is where that function begins. Of code that ran before the profiler
    began, mostly a script's top level, it is where it stood then, and so is left out: ``script.py in <module>``.
    """
    match = _FUNCTION.fullmatch(name)
    if match is None or owner(match["file"], match["function"]) is not Owner.USER:
        return None
    line = "" if match["function"] == "<module>" else f":{match['line']}"
    return f"{match['file']}{line} in {match['function']}"


def place_in_words(line: str) -> str:
    """Return a finding's line as part of a sentence: ``at a.py:65``; ``in forward, which begins at a.py:57``."""
    place, _, function = line.rpartition(" in ")
    if not place:
        return f"at {line}"
    return f"in {place}" if function == "<module>" else f"in {function}, which begins at {place}"


def innermost_line(frame: FrameType | None, outermost: FrameType | None = None) -> str | None:
    """Return the innermost line of a stack that is the user's own, or else another package's or a model's of auxhead.

    The look-up ends with the frame ``outermost``. None: there is only torch, autotune and the standard library.
    """
    other: str | None = None
    while frame is not None:
        whose = owner(frame.f_code.co_filename)
        if whose is Owner.USER:
            return _line(frame)
        if whose in (Owner.PACKAGE, Owner.AUXHEAD):
            other = other or _line(frame)
        if frame is outermost:
            break
        frame = frame.f_back
    return other


def calling_line(frame: FrameType | None) -> str | None:
    """Return the line that calls a method of a stream or an event, if the user's own code or a package does so itself.

    None: torch or auxhead calls it.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.endswith(_STREAMS) and owner(file) is not Owner.STANDARD:
            return _line(frame) if owner(file) in (Owner.USER, Owner.PACKAGE) else None
        frame = frame.f_back
    return None


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
