"""Tuned tables whose bytes or JSON are damaged: read, or refused in one line; a forward goes on by rule."""

import json
import random

import pytest
from auxhead.kernels.launch.tuned_table import MOST_ELEMENTS, BadTable, read_table
from support.damaged import UNREADABLE, damaged_bytes, damaged_json, make_unreadable, read_damaged
from support.example_tables import TAPS, entry, head_shape, table

WHOLE = table(
    entry(head_shape()), entry(head_shape(TAPS[1], pool="max")), entry(head_shape(TAPS[3], 32, classes=1000))
).as_text()


def test_any_damage(tmp_path):
    path, found = tmp_path / "cpu.json", []
    for seed in range(600):
        dice = random.Random(seed)
        content = damaged_bytes(WHOLE.encode(), dice) if seed % 3 else damaged_json(json.loads(WHOLE), dice)
        found.append(read_damaged(path, content, lambda: read_table(path), BadTable, path))
    kept = [one for one in found if one is not None]
    assert 5 < len(kept) < 200
    for one in kept:
        again = tmp_path / "again.json"
        again.write_text(one.as_text())
        assert set(read_table(again).entries) == set(one.entries)
        for row in one.entries:
            assert row.config.block_c <= MOST_ELEMENTS and row.config.programs(row.shape.view, row.shape.classes)


@pytest.mark.parametrize("kind", sorted(set(UNREADABLE) - {"pipe", "device"}))
def test_no_file_in_its_place(kind, tmp_path):
    path = tmp_path / "cpu.json"
    path.write_text(WHOLE)
    make_unreadable(path, kind)
    with pytest.raises(BadTable, match="cpu.json: cannot be read"):
        read_table(path)
