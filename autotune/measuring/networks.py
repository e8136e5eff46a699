"""The networks that options choose: found before the device is asked for, made on it."""

from collections.abc import Callable

from .cells import Cell
from .options import NetworkChoice, is_factory
from .subject import Subject, find_subject


def find_networks(chosen: NetworkChoice) -> Callable[[], tuple[Subject | None, list[Cell]]]:
    """Find what was chosen; a name that is wrong is told whatever the machine lacks.

    Returns:
        A function that returns the user's network, if it is one, and the cells of all; raises as ``find_subject``'s.

    Raises:
        BadInput: there is no such function of the user's.
    """
    if not is_factory(chosen.model):
        return lambda: (None, chosen.cells())
    make = find_subject(chosen.model)

    def own() -> tuple[Subject, list[Cell]]:
        subject = make()
        return subject, [subject.cell]

    return own
