"""Places the calls of the CUDA API: the operator, the user's function and the head that each is made in."""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from .annotations import HEAD
from .events import Event, Events
from .sources import user_line


class Place(NamedTuple):
    """What a call is made in, innermost first."""

    operator: Event | None = None
    line: str | None = None
    head: str | None = None


def placed_calls(events: Events) -> Iterator[tuple[Event, Place]]:
    """Yield each call with its place, thread by thread.

    Whatever holds a call has begun before it on the same thread, and not ended: one pass with a stack.
    """
    by_thread: dict[str, list[Event]] = defaultdict(list)
    heads = [event for event in events.annotations if event.name.startswith(HEAD)]
    for events_of_kind in (heads, events.functions, events.operators, events.calls):
        for event in events_of_kind:
            by_thread[event.thread].append(event)
    for on_thread in by_thread.values():
        on_thread.sort(key=lambda event: (event.start, -event.end))
        yield from _sweep(on_thread)


def _sweep(events: list[Event]) -> Iterator[tuple[Event, Place]]:
    stack: list[tuple[float, Place]] = []
    nowhere = Place()
    for event in events:
        while stack and stack[-1][0] <= event.start:
            stack.pop()
        place = stack[-1][1] if stack else nowhere
        if event.category in ("cuda_runtime", "cuda_driver"):
            yield event, place
        elif event.category == "cpu_op":
            stack.append((event.end, place._replace(operator=event)))
        elif event.category == "user_annotation":
            stack.append((event.end, place._replace(head=event.name.removeprefix(HEAD))))
        else:
            line = user_line(event.name)
            stack.append((event.end, place if line is None else place._replace(line=line)))
