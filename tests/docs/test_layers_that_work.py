"""Layers that docs/details names can feed heads; the lines of "Your code, and what to write" do what they say."""

import re

import pytest
import torch
import torchvision
from auxhead.model import Extract, FusedAuxHead
from auxhead.model.heads.head import with_layout
from auxhead.model.listening.dry_run import dry_run
from support.documents import ROOT, Document
from torch import nn

TABLE = (
    (ROOT / "docs" / "details" / "listening.md").read_text().partition("| family | torchvision | timm | head |\n")[2]
)
#: Library, backbone, layers and how the head pools.
ROWS = [
    (library, *re.fullmatch(r"`(\w+)`: (.+)", cell).groups(), "first" if "first" in pool else "avg")
    for row in TABLE.partition("\n\n")[0].splitlines()[1:]
    for _, *cells, pool in [[cell.strip() for cell in row.strip("|").split("|")]]
    for library, cell in zip(("torchvision", "timm"), cells, strict=True)
    if cell
]


assert len(ROWS) >= 18


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


def test_what_to_write_in_place_of_your_code():
    """The lines that have no snippet of their own."""
    page, linear, fc = Document("docs/details/heads.md"), nn.Linear(8, 3), nn.Linear(8, 1)
    vectors, maps, tokens = torch.randn(4, 8), torch.randn(4, 8, 5, 5), torch.randn(4, 6, 8)
    page.says("| `FusedAuxHead.from_module(nn.Sequential(linear))` |")
    head = FusedAuxHead.from_module(nn.Sequential(linear))
    assert head.linear is linear
    torch.testing.assert_close(head(vectors).probs, linear(vectors).softmax(1))
    page.says("`FusedAuxHead.from_module(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.exit1.fc))`")
    head = FusedAuxHead.from_module(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear))
    torch.testing.assert_close(head(maps).probs, linear(maps.mean((2, 3))).softmax(1))
    page.says("`two.weight.data = torch.cat([torch.zeros_like(fc.weight), fc.weight])`, the bias alike; ")
    two = nn.Linear(fc.in_features, 2)
    two.weight.data = torch.cat([torch.zeros_like(fc.weight), fc.weight])
    two.bias.data = torch.cat([torch.zeros_like(fc.bias), fc.bias])
    torch.testing.assert_close(two(vectors).softmax(1)[:, 1], fc(vectors).sigmoid()[:, 0])
    page.says('`head = FusedAuxHead(768, 10, pool="first")`, then `head.linear = linear`')
    head = FusedAuxHead(8, 3, pool="first")
    head.linear = linear
    torch.testing.assert_close(head(tokens).probs, linear(tokens[:, 0]).softmax(1))
    assert head.state_dict()["linear.weight"].data_ptr() == linear.weight.data_ptr()
