"""Tells the user's own frames in a trace's stacks from those of PyTorch, other libraries and auxhead."""

import re
import sysconfig
from functools import cache
from pathlib import Path

#: How torch.profiler names a frame; the number is that of the function's first line.
_FRAME = re.compile(r"(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.+)")
#: Packages whose frames are nobody's own code; the profiler leaves out the folder that they are installed in.
_LIBRARIES = frozenset(
    {"torch", "torchvision", "torchaudio", "timm", "transformers", "triton", "cuda", "numpy", "typer"}
)
_STANDARD = Path(sysconfig.get_path("stdlib"))
_AUXHEAD = Path(__file__).resolve().parents[2]
_OWN = ("kernels", "model", "autotune", "plots")
#: Parts of auxhead that stand for a user's code.
_SHOWN = ("guides", "examples")


@cache
def user_line(frame: str) -> str | None:
    """Return ``file.py:12 in function`` for a frame of the user's own, with the function's first line; else None."""
    found = _FRAME.fullmatch(frame)
    if found is None or found["file"].startswith("<"):
        return None
    return None if is_library(found["file"]) else f"{found['file']}:{found['line']} in {found['function']}"


@cache
def is_library(file: str) -> bool:
    """Tell whether a file, by its path or what the profiler leaves of it, is a library's, Python's or auxhead's."""
    path = Path(file)
    if path.is_absolute():
        if any(part in ("site-packages", "dist-packages") for part in path.parts) or _STANDARD in path.parents:
            return True
        return _AUXHEAD in path.parents and _is_own(path.relative_to(_AUXHEAD))
    if path.parts[0] in _LIBRARIES or (_STANDARD / path).is_file():
        return True
    if path.parts[0] == "auxhead":
        return _is_own(Path(*path.parts[1:]))
    return (_AUXHEAD / path).is_file() and _is_own(path)


def _is_own(path: Path) -> bool:
    return path.parts[0] in _OWN and not any(part in _SHOWN for part in path.parts)
