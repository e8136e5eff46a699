"""``parse_json``, ``read_json``, ``write_json``: JSON that is complete or absent, and refused where it is damaged.

No torch here, so that whoever reads records can do without.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from .replacing import replacing


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: no JSON, nested too deep, or an object with a name twice, of which nobody knows the right one.
    """
    try:
        return _decode(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"has {twice!r:.60} twice in one object")
    return made


_decode = json.JSONDecoder(object_pairs_hook=_object).decode


def as_json(content: object) -> str:
    """Return the text of a JSON file."""
    return json.dumps(content, indent=2) + "\n"


def write_json(path: Path, content: object) -> None:
    """Write a JSON file, or leave the one that is there as it is; of several writers at a time the last one wins."""
    with replacing(path) as unfinished:
        unfinished.write_text(as_json(content), encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: it cannot be read, or is no file: whoever opens a pipe waits.
        ValueError: it holds no JSON; see :func:`parse_json`.
    """
    if path.exists() and not path.is_file():
        raise OSError(None, "is not a file", str(path))
    return parse_json(path.read_text(encoding="utf-8"))
