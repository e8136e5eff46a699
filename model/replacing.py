"""``replacing``: replaces files when what is written in their place is complete, and writes through no link."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write to, which takes the place of ``path`` at the end if nothing was raised.

    It lies in a folder of its own beside ``path``, under a name that nobody can foresee and put a link at. A link in
    the place of ``path`` is replaced, and what it leads to stays as it is.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        os.replace(unfinished, path)
