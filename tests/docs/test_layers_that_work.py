"""The layers that model/README.md names for backbones of others can feed heads."""

import re

import pytest
import torch
import torchvision
from auxhead.model.dry_run import dry_run
from support.documents import ROOT

#: Backbone, layers and how the head pools, a line of the tables each.
ROWS = re.findall(
    r"^\| `(\w+)`[^|]* \| ((?:`[\w.]+`(?:, )?)+)[^|]* \| (?:`pool=\"(\w+)\"`)? ?\|$",
    (ROOT / "model" / "README.md").read_text(),
    flags=re.MULTILINE,
)


@pytest.mark.parametrize(("name", "layers", "pool"), ROWS, ids=lambda value: value if "." not in value else "")
def test_layers_work(name, layers, pool):
    options = {"googlenet": {"init_weights": False}, "vit_b_16": {"image_size": 32}}.get(name, {})
    with torch.device("cpu" if name.startswith("regnet") else "meta") as device:  # a RegNet reads what it initialises
        backbone = torchvision.models.get_model(name, num_classes=10, **options)
    run = dry_run(backbone, re.findall(r"`(.+?)`", layers), torch.randn(2, 3, 32, 32, device=device))
    assert len(run.features) >= 2
    assert {y.ndim for y in run.features} == {3 if pool == "first" else 4}


def test_rows_were_found():
    assert len(ROWS) >= 10
