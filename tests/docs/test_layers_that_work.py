"""The layers that model/README.md names for backbones of torchvision and timm can feed heads."""

import re

import pytest
import torch
import torchvision
from auxhead.model import Extract, FusedAuxHead
from auxhead.model.heads.head import with_layout
from auxhead.model.listening.dry_run import dry_run
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
    options = {
        "googlenet": {"init_weights": False},
        "inception_v3": {"init_weights": False},
        "vit_b_16": {"image_size": 32},
    }.get(name, {})
    side = 224 if "224" in name or name == "maxvit_t" else 299 if name == "inception_v3" else 32
    # a RegNet of torchvision reads what it has initialised
    with torch.device("cpu" if name.startswith("regnet_") else "meta") as device:
        backbone = make(name, num_classes=10, **options)
        x = torch.randn(2, 3, side, side, device=device)
        taps, head = re.findall(r"`([\w.]+)`", layers), FusedAuxHead(None, 10, pool=pool)
        run = dry_run(backbone, taps, x)
    layout = "NTD" if pool == "first" else "NHWC" if name.startswith("swin") else "NCHW"
    for tap, y, channels in zip(taps, run.features, run.channels, strict=True):
        assert with_layout(tap, Extract(), y, head, channels).layout == layout


def test_rows_were_found():
    assert len(ROWS) >= 18
