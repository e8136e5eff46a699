"""Replaces files when what is written in their place is complete, and writes through no link."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file in a new folder beside ``path``, which takes its place at the end if nothing was raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        os.replace(unfinished, path)
