"""``Deadline``: the end of the time that a budget leaves for making and measuring runners."""

import time
from dataclasses import dataclass

from ..arguments import kind_of

#: Seconds that making a runner may take, by the name of the budget.
BUDGETS = {"quick": 10.0, "thorough": 60.0}


def check_budget(budget: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless an argument is one of ``BUDGETS``."""
    if not isinstance(budget, str):
        raise TypeError(f"budget: got {kind_of(budget)}, wants one of {', '.join(map(repr, BUDGETS))}")
    if budget not in BUDGETS:
        raise ValueError(f"budget: got {budget!r}, wants one of {', '.join(map(repr, BUDGETS))}")


@dataclass(frozen=True)
class Deadline:
    """A time by which all should be made and measured; what is under way then is not cut short."""

    budget: str
    seconds: float
    """From its beginning to its end."""
    end: float
    """By ``time.monotonic``."""

    @classmethod
    def of(cls, budget: str) -> "Deadline":
        """Begin a budget now."""
        return cls(budget, BUDGETS[budget], time.monotonic() + BUDGETS[budget])

    @property
    def left(self) -> float:
        """Seconds, less than none once it is over."""
        return self.end - time.monotonic()

    def part(self, parts: int) -> "Deadline":
        """Return the end of the first of so many equal parts of what is left."""
        part = self.left / parts
        return Deadline(self.budget, part, time.monotonic() + part)

    def too_late(self) -> str:
        """Say why something was not begun any more."""
        return f"too little was left of {self}"

    def __str__(self) -> str:
        return f"the {BUDGETS[self.budget]:g} s of budget={self.budget!r}"
