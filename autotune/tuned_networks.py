"""Which networks a command tunes, on which device, and where its records are."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from ..model.bad_input import BadInput
from .cells import STAGES, Cell, Dtype, Placement, resnet_cell
from .measurer import Target
from .subject import Subject, is_factory, load_subject

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="resnet18, resnet34, resnet50, or your own: package.module:function, which takes nothing and returns "
        "(EarlyExitNetwork in eval mode, example batch), both on the GPU.",
        show_default=False,
    ),
]
BatchOption = Annotated[list[int] | None, typer.Option(min=1, help="Images a call.", show_default="1")]
DtypeOption = Annotated[list[Dtype] | None, typer.Option(help="Of weights and inputs.", show_default="float16")]
ClassesOption = Annotated[list[int] | None, typer.Option(min=1, help="Of every exit.", show_default="1000")]
PlacementOption = Annotated[
    list[Placement] | None,
    typer.Option(help="A head after every block, every stage, or every stage but the last.", show_default="stages"),
]


@dataclass(frozen=True)
class Chosen:
    """The networks that the options choose."""

    model: str
    batches: Sequence[int]
    dtypes: Sequence[str]
    classes: Sequence[int]
    placements: Sequence[str]

    @classmethod
    def of(
        cls,
        model: str,
        batch: list[int] | None,
        dtype: list[Dtype] | None,
        classes: list[int] | None,
        placement: list[Placement] | None,
    ) -> "Chosen":
        """Take over the options."""
        dtypes, placements = [one.value for one in dtype or []], [one.value for one in placement or []]
        return cls(model, batch or [], dtypes, classes or [], placements)

    def networks(self) -> tuple[Subject | None, list[Cell]]:
        """Return the user's network, if it is one, and all cells.

        Raises:
            BadInput: no such network, or options that are not for the user's own.
        """
        if is_factory(self.model):
            own = self._own()
            return own, [own.cell]
        return None, self._cells()

    def _cells(self) -> list[Cell]:
        if self.model not in STAGES:
            raise BadInput(f"MODEL: got {self.model}, wants one of {', '.join(STAGES)} or package.module:function")
        return [
            resnet_cell(self.model, dtype, batch, classes, placement)
            for dtype in self.dtypes or ["float16"]
            for batch in self.batches or [1]
            for classes in self.classes or [1000]
            for placement in self.placements or ["stages"]
        ]

    def _own(self) -> Subject:
        given = (
            ("batch", self.batches),
            ("dtype", self.dtypes),
            ("classes", self.classes),
            ("placement", self.placements),
        )
        for option, values in given:
            if values:
                raise BadInput(f"--{option}: is that of the network which {self.model} returns, wants no value here")
        sys.path.insert(0, "")  # as `python -m` does: the user's module lies where the command is run
        return load_subject(self.model)

    def fits(self, target: Target) -> bool:
        """Whether a recorded target is of what was asked for; where heads were is not recorded."""
        shape = target.shape
        asked: tuple[tuple[object, Sequence[object]], ...] = (
            (shape.samples, self.batches),
            (shape.dtype, self.dtypes),
            (shape.classes, self.classes),
        )
        return all(not values or value in values for value, values in asked)


def device_here(command: str) -> torch.device:
    """Return the current CUDA device.

    Raises:
        BadInput: there is none.
    """
    if not torch.cuda.is_available():
        raise BadInput(f"{command}: torch sees no CUDA device here, wants one")
    return torch.device("cuda", torch.cuda.current_device())


def records_of(command: str, device: torch.device) -> Path:
    """Return where a command keeps its records of a device unless it is told otherwise."""
    gpu = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    return Path("autotune-records") / f"{command}-{gpu}.jsonl"
