"""Replaces files when what is written in their place is complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file beside ``path`` to write to, which takes its place at the end if nothing was raised."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    yield unfinished
    os.replace(unfinished, path)
