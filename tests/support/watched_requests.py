"""Requests of small programs under the doctor's watcher, and what it saw in them."""

from pathlib import Path

import torch
from auxhead.autotune.doctor.trace import Watched
from auxhead.autotune.doctor.watching.watcher import Watcher


def watched(request, requests=2) -> Watched:
    """Watch some requests, without gradients."""
    with torch.no_grad(), Watcher() as watching:
        for _ in range(requests):
            request()
    torch.cuda.synchronize()
    return watching.watched(requests)


def faults(seen: Watched) -> list[str]:
    """Kinds of faults, races among them; that the host waits is told of each program that asks for its answer."""
    return sorted({one.kind for one in seen.noticed} - {"host-wait"} | {"race" for _ in seen.races})


def used(seen: Watched) -> list[tuple[int, int]]:
    """Streams that operators ran on, with their number."""
    return [(use.handle, use.operators) for use in seen.streams if use.operators]


def marked_line(file: str, mark: str) -> str:
    """The line of a file that ends with a mark, as evidence has it."""
    lines = Path(file).read_text().splitlines()
    (number,) = (number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))
    return f"{Path(file).name}:{number}"


def current() -> torch.cuda.Stream:
    return torch.cuda.current_stream()
