"""Python's garbage collection, kept from where it costs time or breaks a capture."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect no garbage meanwhile; what is not in a circle of references is freed all the same.

    To look for it among millions of numbers that are kept takes as long as to read them. And what it finds, another
    graph say, may wait for the device or free memory, which breaks a capture.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()
