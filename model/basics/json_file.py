"""``write_json`` and ``read_json``: JSON files that are complete or absent, and refused where they are damaged."""

import json
from pathlib import Path
from typing import Any

from ...kernels.json_text import parse_json
from .replacing import replacing


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
