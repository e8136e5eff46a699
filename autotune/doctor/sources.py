"""Tells the user's own functions among those of a profiler's stacks, and names them by file and line."""

import re
import sys
from functools import cache
from pathlib import Path, PurePath

_FUNCTION = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)")
_STANDARD_LIBRARY = re.compile(r"(^|/)lib/python3[^/]*/")
#: Folders of installed packages, whose paths a profiler gives in full where they are not on ``sys.path``.
_INSTALLED = {"site-packages", "dist-packages"}
#: Packages whose paths it shortens, as it does with all that is on ``sys.path``: nobody's own code.
_PACKAGES = {
    *("torch", "torchvision", "torchaudio", "torchgen", "functorch", "triton", "timm", "auxhead", "numpy"),
    *("transformers", "accelerate", "lightning", "pytorch_lightning", "tqdm", "pytest", "_pytest", "pluggy"),
    *("IPython", "ipykernel", "typer", "click", "rich"),
}
#: Cells of notebooks, and what is typed: the only code without a file that is the user's.
_TYPED = ("<ipython-input", "<stdin>")
#: Where this package's rooms lie, installed or in a clone.
_OWN = Path(__file__).resolve().parents[2]
_OWN_ROOMS = ("kernels", "model", "autotune", "plots")
#: What there is to be looked at as anybody's code.
_SHOWN = (("model", "examples"), ("model", "guides"))


@cache
def user_line(name: str) -> str | None:
    """Return ``file.py:12 in forward`` for a function of the user's own, by its event's name; None for any other's.

    Names are ``file.py(12): forward``, and 12 is where that function begins. Of code that ran before the profiler
    began, mostly a script's top level, it is where it stood then, and so is left out: ``script.py in <module>``.
    """
    match = _FUNCTION.fullmatch(name)
    if match is None or not is_users(match["file"], match["function"]):
        return None
    line = "" if match["function"] == "<module>" else f":{match['line']}"
    return f"{match['file']}{line} in {match['function']}"


def place_in_words(line: str) -> str:
    """Return a finding's line as part of a sentence: ``at a.py:65``; ``in forward, which begins at a.py:57``."""
    place, _, function = line.rpartition(" in ")
    if not place:
        return f"at {line}"
    return f"in {place}" if function == "<module>" else f"in {function}, which begins at {place}"


def is_users(file: str, function: str) -> bool:
    """Return whether a function is the user's own: of no installed package, nor the standard library, nor ours."""
    if file.startswith("<"):
        return file.startswith(_TYPED)
    path = PurePath(file)
    if path.parts[0] in _PACKAGES or _INSTALLED & set(path.parts) or _STANDARD_LIBRARY.search(file):
        return False
    if not path.is_absolute() and path.parts[0].removesuffix(".py") in sys.stdlib_module_names:
        return function == "<module>"  # a script may be called so; modules of the library were imported before
    return not is_own(file)


def is_standard(file: str) -> bool:
    """Return whether a file, by its whole path, is of the standard library."""
    return file.startswith("<frozen") or (
        _STANDARD_LIBRARY.search(file) is not None and not _INSTALLED & set(PurePath(file).parts)
    )


def is_own(file: str) -> bool:
    """Return whether a file is of this package, but for its examples and guides."""
    path = PurePath(file)
    parts = path.parts
    if path.is_absolute():
        try:
            parts = path.relative_to(_OWN).parts
        except ValueError:
            parts = parts[parts.index("auxhead") + 1 :] if "auxhead" in parts else ()
    inside = bool(parts) and parts[0] in _OWN_ROOMS and parts[:2] not in _SHOWN
    return inside and (path.is_absolute() or (_OWN / path).is_file())
