"""Pauses Python's garbage collection where much is read and nothing is garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
