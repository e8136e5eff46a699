"""Options that choose what is measured: torchvision's ResNets or a user's own network, exit patterns; no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

import typer

from ...model.basics.bad_input import BadInput
from ...model.commands.options import RUNS_YOUR_CODE
from .cells import STAGES, Cell, Dtype, Heads, Placement, all_cells

MODEL_HELP = (
    "resnet18, resnet34, resnet50, or your own: package.module:function, which takes nothing and returns "
    f"(EarlyExitNetwork in eval mode, example batch), both on the GPU. {RUNS_YOUR_CODE}"
)
Model = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)]
Batches = Annotated[list[int] | None, typer.Option(min=1, help="Images a call.", show_default="1")]
Dtypes = Annotated[list[Dtype] | None, typer.Option(help="Of weights and inputs.", show_default="float16")]
Classes = Annotated[list[int] | None, typer.Option(min=2, help="Of every exit.", show_default="1000")]
Placements = Annotated[
    list[Placement] | None,
    typer.Option(help="A head after every block, every stage, or every stage but the last.", show_default="stages"),
]
HeadKinds = Annotated[
    list[Heads] | None,
    typer.Option(help="One linear layer; 128 hidden features before it; a norm before it.", show_default="linear"),
]


def out_option(*kinds: str) -> Any:
    """Return the option for the file that records, each time of one of these kinds, are appended to."""
    files = " or ".join(f"autotune-records/{kind}-DEVICE.jsonl" for kind in kinds)
    return typer.Option(help="Records are appended here.", show_default=files)


#: Values of the options that choose networks where none is given.
_USUAL = {"dtype": ("float16",), "batch": (1,), "classes": (1000,), "placement": ("stages",), "heads": ("linear",)}


@dataclass(frozen=True)
class NetworkChoice:
    """Networks as the options choose them."""

    model: str
    asked: Mapping[str, Sequence[Any]]
    """By the parameters of ``resnet_cell``, the options that have values."""

    @classmethod
    def of(cls, model: str, **options: Sequence[Any] | None) -> "NetworkChoice":
        """Make the choice from the options as typer gives them, or refuse a model that there is none of."""
        chosen = cls(model, values_of(options))
        check_model("MODEL", model)
        if is_factory(model):
            check_own(model, chosen.asked)
        return chosen

    @property
    def own(self) -> str | None:
        """The model, if it is a user's factory."""
        return self.model if is_factory(self.model) else None

    @property
    def cells(self) -> list[Cell]:
        """The cells of torchvision's ResNets."""
        return [] if self.own else all_cells({"model": (self.model,), **_USUAL, **self.asked})


def values_of(options: Mapping[str, Sequence[Any] | None]) -> dict[str, list[Any]]:
    """Return the values of options that have any, enumerations by their values."""
    return {name: [getattr(one, "value", one) for one in values] for name, values in options.items() if values}


def is_factory(model: str) -> bool:
    """Return whether a model is a user's factory, "package.module:function"."""
    return ":" in model


def check_model(option: str, model: str) -> None:
    """Refuse a model that is neither one of torchvision's nor a user's factory, with ``BadInput``."""
    if not is_factory(model) and model not in STAGES:
        raise BadInput(f"{option}: got {model}, wants one of {', '.join(STAGES)} or package.module:function")


def check_own(model: str, chosen: Iterable[str]) -> None:
    """Refuse, with ``BadInput``, options that have values beside a user's factory."""
    for option in chosen:
        raise BadInput(f"--{option}: is that of the network which {model} returns, wants no value here")


def chosen_patterns(cell: Cell, wanted: Sequence[str]) -> list[str]:
    """Return the exit patterns asked for that the cell has."""
    return [name for name in cell.patterns if not wanted or any(fnmatchcase(name, glob) for glob in wanted)]


def check_patterns(wanted: Sequence[str], cells: Sequence[Cell]) -> None:
    """Refuse a glob that fits no exit pattern, with ``BadInput``."""
    check_globs("--exits", wanted, (name for cell in cells for name in cell.patterns))


def check_globs(option: str, wanted: Sequence[str], names: Iterable[str]) -> None:
    """Refuse a glob that fits none of the names, with ``BadInput``."""
    names = list(dict.fromkeys(names))
    for glob in wanted:
        if not any(fnmatchcase(name, glob) for name in names):
            raise BadInput(f"{option}: got {glob}, wants names or globs of: {', '.join(names)}")
