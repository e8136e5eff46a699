"""Cells: the core matrix, and the choice of cells by options."""

import dataclasses

from auxhead.autotune.bench.variants import catalogue, smaller_sizes
from auxhead.autotune.measuring.cells import chosen_cells, core_matrix, resnet_cell


def test_core_matrix():
    cells = core_matrix()
    assert len(cells) == len(set(cells)) == 33
    assert {(cell.batch, cell.classes, cell.placement) for cell in cells[:16]} == {
        (batch, classes, placement) for batch in (1, 8, 32, 128) for classes in (10, 1000)
        for placement in ("blocks", "stages")
    }  # fmt: skip
    assert resnet_cell("resnet18", "float16", 1, 10, "blocks").taps == tuple(
        f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)
    )
    assert resnet_cell("resnet50", "float16", 1, 10, "stages").taps == ("layer1", "layer2", "layer3", "layer4")
    mixed = cells[-1]
    assert (mixed.batch, mixed.classes) == (64, 10) and mixed.taps == ("layer1", "layer2", "layer3")
    assert mixed.patterns == ["never", "layer1", "layer2", "layer3", "40/30/20/10"]
    assert cells[0].patterns == ["never", *cells[0].taps]
    assert smaller_sizes(64) == (8, 16, 24, 32, 40, 48, 64) and smaller_sizes(2) == (1, 2)
    names = {variant.name: variant for variant in catalogue(mixed)}
    assert names["polled-compact@cudnn"].by_default
    for other in (cells[0], dataclasses.replace(mixed, batch=1)):
        assert "polled-compact@cudnn" not in [variant.name for variant in catalogue(other)]


def test_chosen_cells():
    assert len(chosen_cells(quick=True)) == 2
    assert {cell.batch for cell in chosen_cells(quick=False, batch=[8], model=["resnet18"])} == {8}
    outside = chosen_cells(quick=False, model=["resnet50"], batch=[8], classes=[10], placement=["stages"])
    assert outside == [resnet_cell("resnet50", "float16", 8, 10, "stages")]
    (mixed,) = chosen_cells(quick=False, placement=["inner-stages"])
    assert mixed == core_matrix()[-1]
    both = chosen_cells(quick=True, dtype=["float16", "float32"])
    assert [(cell.dtype, cell.batch) for cell in both] == [
        (dtype, n) for dtype in ("float16", "float32") for n in (1, 8)
    ]


def test_kinds_of_heads_are_cells_of_their_own():
    linear, hidden = chosen_cells(quick=False, **OF_ONE, heads=["linear", "hidden"])
    assert linear == resnet_cell(**OF_ONE_CELL) and hidden == resnet_cell(**OF_ONE_CELL, heads="hidden")
    assert "heads" not in linear.as_json() and "4 heads (stages)" in str(linear)
    assert hidden.as_json()["heads"] == "hidden" and "4 hidden heads (stages)" in str(hidden)


OF_ONE_CELL = {"model": "resnet18", "dtype": "float16", "batch": 1, "classes": 10, "placement": "stages"}
OF_ONE = {name: [value] for name, value in OF_ONE_CELL.items()}
