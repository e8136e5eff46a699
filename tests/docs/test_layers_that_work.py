"""The layers that model/README.md names for backbones of torchvision and timm can feed heads."""

import re

import pytest
import torch
import torchvision
from auxhead.model.dry_run import dry_run
from support.documents import ROOT

TABLE = (ROOT / "model" / "README.md").read_text().partition("| family | torchvision | timm | head |\n")[2]
#: Library, backbone, layers and how the head pools.
ROWS = [
    (library, *re.fullmatch(r"`(\w+)`: (.+)", cell).groups(), "first" if "first" in pool else "avg")
    for row in TABLE.partition("\n\n")[0].splitlines()[1:]
    for _, *cells, pool in [[cell.strip() for cell in row.strip("|").split("|")]]
    for library, cell in zip(("torchvision", "timm"), cells, strict=True)
    if cell
]


@pytest.mark.parametrize(("library", "name", "layers", "pool"), ROWS, ids=[f"{row[0]}-{row[1]}" for row in ROWS])
def test_layers_work(library, name, layers, pool):
    make = torchvision.models.get_model if library == "torchvision" else pytest.importorskip("timm").create_model
    options = {"googlenet": {"init_weights": False}, "vit_b_16": {"image_size": 32}}.get(name, {})
    side = 224 if "224" in name else 32
    # a RegNet of torchvision reads what it has initialised
    with torch.device("cpu" if name.startswith("regnet_") else "meta") as device:
        backbone = make(name, num_classes=10, **options)
        run = dry_run(backbone, re.findall(r"`([\w.]+)`", layers), torch.randn(2, 3, side, side, device=device))
    for y in run.features:
        channels_last = y.ndim == 4 and y.shape[1] == y.shape[2]
        assert channels_last == ("permuted" in layers), list(y.shape)
        assert y.ndim == (3 if pool == "first" else 4)


def test_rows_were_found():
    assert len(ROWS) >= 18
