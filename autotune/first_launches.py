"""First launches of many variants, which compile them: in threads, since the compiler leaves Python often."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from .measurer import Failure
from .timing import Key

#: What is compiled at the same time, at most: each takes a core.
_MOST_WORKERS = 32


def first_launches(
    variants: Sequence[Key], launch: Callable[[Key], object], device: torch.device
) -> dict[Key, Failure]:
    """Launch each variant once on a CUDA device, and return what failed."""

    def attempt(variant: Key) -> Failure | None:
        try:
            with torch.cuda.device(device), torch.no_grad():
                launch(variant)
                torch.cuda.current_stream(device).synchronize()
        except Exception as error:
            return Failure.of(error)
        return None

    first = [attempt(variant) for variant in variants[:1]]  # by itself: it reads the kernel's sources for all
    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MOST_WORKERS)) as pool:
        rest = list(pool.map(attempt, variants[1:]))
    return {variant: failed for variant, failed in zip(variants, first + rest, strict=True) if failed}
