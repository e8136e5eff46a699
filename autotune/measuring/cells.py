"""Cells: the networks that are measured, by data type, batch, classes, placement of heads; names of trunks, runners."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any

from ...model.runners import table

#: The trunk as the user wrote it.
AS_IS = "as_is"
#: Trunks that are measured unless ``--variant`` names others.
TRUNKS = (AS_IS, "cudnn")
#: Further trunks that ``--variant`` may name.
MORE_TRUNKS = ("inductor",)
#: Runners that are measured on every trunk, as ``make_runner`` names them.
RUNNERS = tuple(name for name, kind in table.RUNNERS.items() if kind.graphs)


#: Blocks of each of the four stages of torchvision's ResNets.
STAGES = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3), "resnet50": (3, 4, 6, 3)}

#: The exit pattern in which every sample goes through to the classifier.
NEVER = "never"
#: The exit pattern given by the thresholds that a user's model came with.
OWN = "own"
#: The exit pattern in which so many percent of all samples leave at each of three taps, and last at the classifier.
SHARES = "40/30/20/10"
#: The placement of heads that ``SHARES`` is for.
INNER_STAGES = "inner-stages"
#: Exit patterns in which samples of one batch leave at several exits, by placement.
MIXED = {INNER_STAGES: SHARES, "own": OWN}


class Dtype(str, Enum):
    """Data types of weights and inputs, by name."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


class Placement(str, Enum):
    """Placements of heads in a torchvision ResNet."""

    blocks = "blocks"
    stages = "stages"
    inner_stages = INNER_STAGES


class Heads(str, Enum):
    """Kinds of heads, by name."""

    linear = "linear"
    hidden = "hidden"
    norm = "norm"


@dataclass(frozen=True)
class Cell:
    """One network and batch; all variants of it are measured together."""

    model: str
    """"resnet18", "resnet34", "resnet50", or a user's factory: "package.module:function"."""
    dtype: str
    batch: int
    classes: int
    placement: str
    """"blocks": a head after every residual block. "stages": after layer1, layer2, layer3 and layer4. "inner-stages":
    after layer1, layer2 and layer3. "own": where the user's model has them."""
    taps: tuple[str, ...]
    input: tuple[int, ...] = (3, 224, 224)
    """The shape of one sample."""
    heads: str = Heads.linear.value
    """"linear": one linear layer. "hidden": 128 features with GELU before it. "norm": a LayerNorm before it. Of a
    user's model "linear", whatever they are."""

    def __str__(self) -> str:
        shape = "x".join(str(size) for size in self.input)
        kind = "" if self.heads == Heads.linear.value else f"{self.heads} "
        return (
            f"{self.model} {self.dtype}, batch {self.batch}, {self.classes} classes, "
            f"{len(self.taps)} {kind}heads ({self.placement}), input {shape}"
        )

    @property
    def patterns(self) -> list[str]:
        """The exit patterns that are measured: never, all samples at each tap, and the mixed one if there is one."""
        return [NEVER, *self.taps, *([MIXED[self.placement]] if self.placement in MIXED else [])]

    def as_json(self) -> dict[str, Any]:
        """Return the cell as records hold it: without its kind of heads if that is linear, as it always was."""
        values = {**dataclasses.asdict(self), "taps": list(self.taps), "input": list(self.input)}
        return {name: value for name, value in values.items() if (name, value) != ("heads", Heads.linear.value)}


def resnet_cell(
    model: str, dtype: str, batch: int, classes: int, placement: str, heads: str = Heads.linear.value
) -> Cell:
    """Return the cell of one of torchvision's ResNets at 224x224."""
    stages = STAGES[model][:3] if placement == INNER_STAGES else STAGES[model]
    taps = tuple(
        name
        for stage, blocks in enumerate(stages, start=1)
        for name in (
            [f"layer{stage}.{block}" for block in range(blocks)] if placement == "blocks" else [f"layer{stage}"]
        )
    )
    return Cell(model, dtype, batch, classes, placement, taps, heads=heads)


#: What is measured unless options say otherwise, and with ``--quick``, by the parameters of ``resnet_cell``.
_USUAL: dict[str, Sequence[Any]] = {
    "model": ("resnet18",), "dtype": ("float16",), "batch": (1, 8, 32, 128), "classes": (10, 1000),
    "placement": ("blocks", "stages"), "heads": (Heads.linear.value,),
}  # fmt: skip
_QUICK = {**_USUAL, "batch": (1, 8), "classes": (10,), "placement": ("stages",)}
#: Where samples of one batch leave at several exits.
_MIXED = {**_USUAL, "batch": (64,), "classes": (10,), "placement": (INNER_STAGES,)}


def all_cells(values: Mapping[str, Sequence[Any]]) -> list[Cell]:
    """Return the cells of all combinations of values, which are by the parameters of ``resnet_cell``."""
    return [resnet_cell(**dict(zip(values, one, strict=True))) for one in product(*values.values())]


def core_matrix() -> list[Cell]:
    """Return the matrix that the README's numbers come from: at batch 1 and 32 in more dtypes and with ResNet-50.

    In the last cell samples of one batch leave at several exits.
    """
    further = [{**_USUAL, "batch": (1, 32), **one} for one in ({"model": ("resnet50",)}, {"dtype": ("bfloat16",)})]
    return [cell for values in (_USUAL, *further, _MIXED) for cell in all_cells(values)]


def chosen_cells(*, quick: bool, **asked: Sequence[Any]) -> list[Cell]:
    """Return the cells of the values asked for, by the parameters of ``resnet_cell``, and of usual ones of the others.

    Where no value is given, all of the core matrix; or two cells that show in minutes whether everything runs.
    """
    given = {name: values for name, values in asked.items() if values}
    if not given and not quick:
        return core_matrix()
    mixed = [*given.get("placement", ())] == [INNER_STAGES]
    return all_cells({**(_QUICK if quick else _MIXED if mixed else _USUAL), **given})
