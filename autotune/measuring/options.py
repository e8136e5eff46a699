"""The options by which commands that measure heads choose networks."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from ...model.bad_input import BadInput
from .cells import STAGES, Cell, Dtype, Placement, resnet_cell
from .subject import Subject, is_factory, load_subject

Model = Annotated[
    str,
    typer.Argument(
        help="resnet18, resnet34, resnet50, or your own: package.module:function, which takes nothing and returns "
        "(EarlyExitNetwork in eval mode, example batch), both on the GPU.",
        show_default=False,
    ),
]
Batches = Annotated[list[int] | None, typer.Option(min=1, help="Images a call.", show_default="1")]
Dtypes = Annotated[list[Dtype] | None, typer.Option(help="Of weights and inputs.", show_default="float16")]
Classes = Annotated[list[int] | None, typer.Option(min=1, help="Of every exit.", show_default="1000")]
Placements = Annotated[
    list[Placement] | None,
    typer.Option(help="A head after every block, every stage, or every stage but the last.", show_default="stages"),
]


@dataclass(frozen=True)
class NetworkChoice:
    """The networks that the options choose."""

    model: str
    batches: Sequence[int]
    dtypes: Sequence[str]
    classes: Sequence[int]
    placements: Sequence[str]

    @classmethod
    def of(cls, model: str, batch: Batches, dtype: Dtypes, classes: Classes, placement: Placements) -> "NetworkChoice":
        """Take the options as they are given."""
        dtypes, placements = [one.value for one in dtype or []], [one.value for one in placement or []]
        return cls(model, batch or [], dtypes, classes or [], placements)

    def networks(self) -> tuple[Subject | None, list[Cell]]:
        """Return the user's network, if it is one, and the cells of all.

        Raises:
            BadInput: there is no such network or model, or another option chooses what the user's own has.
        """
        own = self._own()
        return own, self._of_torchvision() if own is None else [own.cell]

    def _own(self) -> Subject | None:
        if not is_factory(self.model):
            return None
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

    def _of_torchvision(self) -> list[Cell]:
        if self.model not in STAGES:
            raise BadInput(f"MODEL: got {self.model}, wants one of {', '.join(STAGES)} or package.module:function")
        return [
            resnet_cell(self.model, dtype, batch, classes, placement)
            for dtype in self.dtypes or ["float16"]
            for batch in self.batches or [1]
            for classes in self.classes or [1000]
            for placement in self.placements or ["stages"]
        ]
