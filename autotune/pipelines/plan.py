"""``PipelinePlan``: what the processes of the benchmark measure, handed to each of them as JSON."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from ..measuring.cells import Cell

#: Of each network the tap where it is cut for two GPUs, that of PyTorch's tutorial.
CUT = "layer2"
#: Samples of a micro-batch.
SPLIT_SIZES = (20, 40, 64)
#: Images a request.
BATCHES = (120, 512)
#: Timed rounds: three of each of the fresh captures.
ROUNDS = 15
CAPTURES = 5


@dataclass(frozen=True)
class PipelinePlan:
    """What is measured, of one network."""

    cell: Cell
    """With the largest batch."""
    batches: tuple[int, ...]
    split_sizes: tuple[int, ...]
    rounds: int
    out: str
    """The file of records."""
    device: str = "cuda"
    """Kind of the processes' devices."""
    captures: int = CAPTURES
    processes: int = 2

    def splits_of(self, batch: int) -> tuple[int, ...]:
        """Return the split sizes that make micro-batches of a batch, two at least."""
        return tuple(size for size in self.split_sizes if size < batch)

    def cell_of(self, batch: int) -> Cell:
        """Return the cell with that batch."""
        return dataclasses.replace(self.cell, batch=batch)

    def to_json(self) -> str:
        """Return the plan as one argument of a command."""
        return json.dumps({**dataclasses.asdict(self), "cell": self.cell.as_json()})

    @classmethod
    def from_json(cls, text: str) -> "PipelinePlan":
        """Return the plan that ``to_json`` gave."""
        values: dict[str, Any] = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("batches", "split_sizes")}
        return cls(**{**values, **lists, "cell": Cell.from_json(values["cell"])})
