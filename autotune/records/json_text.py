"""``parse_json`` as kernels has it, for what imports no torch; and a pause of garbage collection for large files."""

import gc
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: among millions of numbers that are kept, to look for it takes as long as the rest.

    What is not in a circle of references is freed all the same.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
