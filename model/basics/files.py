"""Files, written complete or not at all; JSON, refused where it is damaged; errors that name what a user named.

No torch here, so that whoever reads records can do without.
"""

import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

#: How a library that is no Python tells of an error of the operating system.
_OF_OTHERS = re.compile(r"\(os error (\d+)\)")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a file to write to, which takes the place of ``path`` at the end if nothing was raised.

    It lies in a folder of its own beside ``path``, under a name that nobody can foresee and put a link at. A link in
    the place of ``path`` is replaced, and what it leads to stays as it is.

    Raises:
        OSError: nothing can be written; names ``path``, whatever was being written.
    """
    with naming(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=".auxhead-") as folder:
        unfinished = Path(folder, path.name)
        yield unfinished
        on_disk(unfinished)
        os.replace(unfinished, path)


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file open for writing, for an output that a user names: a file, a link, a device, a pipe.

    A file is replaced at the end if nothing was raised; of a link what it leads to is. What is no file is written to as
    it is, and so is standard output, by its name or as ``-``.

    Raises:
        OSError: nothing can be written; names ``path``.
    """
    if is_standard_output(path):
        sys.stdout.flush()
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
    elif path.exists() and not path.is_file():
        with naming(path), path.open("wb") as file:
            yield file
    else:
        with replacing(led_to(path)) as unfinished, unfinished.open("wb") as file:
            yield file
            file.flush()


def led_to(path: Path) -> Path:
    """Return a path, or where it leads if it is a link, there or not; ``OSError`` if it leads in a circle."""
    if not path.is_symlink():
        return path
    with suppress(FileNotFoundError):
        path.stat()
    return Path(os.path.realpath(path))


def is_standard_output(path: Path) -> bool:
    """Return whether a path is ``-``, or leads to where standard output goes."""
    if str(path) == "-":
        if sys.stdout is None:
            raise OSError(None, "is closed", "standard output")
        return True
    try:
        return sys.stdout is not None and os.path.samestat(os.stat(path), os.fstat(1))
    except OSError:
        return False


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the operating system name ``path``, and not what is written beside it on the way."""
    try:
        yield
    except Exception as error:
        code = error.errno if isinstance(error, OSError) else next(map(int, _OF_OTHERS.findall(str(error))), None)
        where = error.filename if isinstance(error, OSError) else None
        if code is None or where is not None and not Path(str(where)).is_relative_to(path.parent):
            raise
        raise OSError(code, os.strerror(code), str(path)) from error


def on_disk(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, would be there after a loss of power."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


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
