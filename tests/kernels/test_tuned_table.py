"""tuned_table.py: what a table's file must hold, and which entry serves which head."""

import dataclasses
import json
import random
import re

import pytest
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.launch_config import LaunchConfig
from auxhead.kernels.launch.launch_rule import config_by_rule
from auxhead.kernels.launch.tuned_table import (
    MOST_ELEMENTS,
    BadTable,
    read_table,
    table_of,
    table_path,
    tuned_devices,
)
from support.damaged import UNREADABLE, damaged_bytes, damaged_json, make_unreadable, read_damaged
from support.example_tables import DEVICE, FILE_NAME, TAPS, entry, head_shape, lookup, other, table, write


def test_round_trip_an_entry_a_line_sorted(tables):
    entries = [
        entry(head_shape(tap, samples, classes=classes, layout=layout), serves=(samples, 2 * samples))
        for tap in reversed(TAPS)
        for samples in (32, 8)
        for classes in (1000, 10)
        for layout in ("contiguous", "channels_last")
    ]
    path = write(tables, table(*entries))
    found = read_table(path)
    assert set(found.entries) == set(entries) and dataclasses.replace(found, entries=()) == table()
    assert found.as_text() == path.read_text() == table(*reversed(entries)).as_text()
    lines = path.read_text().splitlines()
    assert sum(line.startswith('{"shape"') for line in lines) == len(entries)
    assert [one.shape.samples for one in found.entries[:4]] == [8, 32, 8, 32], "batch sizes of one head are neighbours"
    assert json.loads(path.read_text())["entries"][0]["shape"]["channels"] == 64


def changed_table(*keys, to=None, without=False):
    """A good table as JSON, with the value at ``keys`` changed or left out."""
    values = json.loads(table(entry(head_shape()), entry(head_shape(TAPS[1], pool="max"))).as_text())
    inner = values
    if not keys:
        return json.dumps(values)
    for key in keys[:-1]:
        inner = inner[key]
    if without:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = to
    return json.dumps(values)


CONFIG = ("entries", 0, "config")
#: Maps of which nothing is pooled, with channels side by side; and how vectors of as many features are read.
TURNED = HeadShape(9, 32, 4, 4, 4, 4, "channels_last", "avg", 10, "float16")
PACKED = LaunchConfig(8, 16, 8, 1, 128, 16, 1, 16, 1, 1, 4, weight_buffers=2, features="packed")
IN_PLACE = dataclasses.replace(PACKED, weight_buffers=5, features="in place")


def reading(config, shape=TURNED, **changes):
    """A table of one head that reads features in memory."""
    return table(entry(shape, config=dataclasses.replace(config, **changes))).as_text()


BAD = {
    "another place of features": (reading(PACKED, features="x"), "features: got 'x', wants one of awaited, packed, in"),
    "few positions in place": (
        reading(IN_PLACE, TURNED._replace(layout="contiguous"), block_c=32, block_p=4),
        "entry 1: block_p: got 4, wants 8 or more of a map in place",
    ),
    "a pool in place": (reading(IN_PLACE, head_shape()), "entry 1: features: got 'in place', wants another one"),
    "packed ones that are split": (reading(PACKED, block_f=1), "block_f: got 1, wants 16 or more where features"),
    "packed ones of 4 samples": (reading(PACKED, block_n=4), "entry 1: block_n: got 4, wants 8 or more where"),
    "packed ones in parts of windows": (reading(PACKED, window_parts=2), "entry 1: window_parts: got 2, wants 1 where"),
    "packed ones without buffers": (reading(PACKED, weight_buffers=0), "weight_buffers: got 0, wants 1 to 5 where"),
    "packed ones that are waited for": (reading(PACKED, waits=True), "entry 1: waits: got True, wants false"),
    "another step in place": (reading(IN_PLACE, block_f=64), "entry 1: block_f: got 64, wants block_c times block_p"),
    "few channels of a turned map": (reading(IN_PLACE, block_c=4, block_f=32), "entry 1: block_c: got 4, wants 8 or"),
    "few positions of one": (
        reading(IN_PLACE, TURNED._replace(dtype="float32"), block_p=2, block_f=32),
        "entry 1: block_p: got 2, wants 4 or",
    ),
    "more slices than a block has": (
        reading(PACKED, TURNED._replace(classes=2**25), block_s=1),
        "entry 1: block_k: got 16, wants at most 1048576 slices",
    ),
    "no JSON": ("{", "is not JSON"),
    "a field more": (changed_table("host", to="x"), "table: unknown host, wants"),
    "an earlier format": (changed_table("schema", to="auxhead tuned 2"), "schema: got 'auxhead tuned 2', wants"),
    "a capability that is a number": (changed_table("capability", to=9.0), "capability: got 9.0, wants text or null"),
    "a version that is a number": (changed_table("cudnn", to=91900), "cudnn: got 91900, wants text or null"),
    "entries by name": (changed_table("entries", to={}), "entries: got {}, wants a list"),
    "a place": (changed_table("entries", 0, "place", to="network"), "entry 1: entry: unknown place, wants config,"),
    "no channels": (changed_table("entries", 1, "shape", "channels", to=0), "entry 2: channels: got 0, wants"),
    "a shape without layout": (changed_table("entries", 0, "shape", "layout", without=True), "entry 1: shape: missing"),
    "no power of two": (changed_table(*CONFIG, "block_c", to=3), "entry 1: block_c: got 3, wants a power of two"),
    "more than a block": (
        changed_table(*CONFIG, "block_c", to=2**21),
        "block_c: got 2097152, wants a power of two",
    ),
    "more samples than are counted": (
        changed_table("entries", 0, "shape", "samples", to=2**31),
        "entry 1: samples: got 2147483648, wants",
    ),
    "a huge margin": (changed_table("entries", 0, "margin", to=10**400), "entry 1: margin: got 1000"),
    "nested too deep": ("[" * 100_000, "is not JSON (nested too deep)"),
    "a cap below zero": (changed_table(*CONFIG, "max_programs", to=-1), "entry 1: max_programs: got -1, wants"),
    "a field of another version": (
        changed_table(*CONFIG, "position_parts", to=1),
        "config: unknown position_parts, wants",
    ),
    "a missing field": (changed_table(*CONFIG, "max_registers", without=True), "config: missing max_registers, wants"),
    "too many warps": (changed_table(*CONFIG, "num_warps", to=64), "entry 1: num_warps: got 64, wants at most 32"),
    "buffers of single samples": (
        changed_table(*CONFIG, "weight_buffers", to=3),
        "entry 1: weight_buffers: got 3, wants 0 where",
    ),
    "tiles of 8 features": (changed_table(*CONFIG, "block_f", to=8), "entry 1: block_f: got 8, wants 1, or 16 or more"),
    **{
        f"too many elements in {name}": (
            changed_table(*CONFIG, to=dataclasses.asdict(dataclasses.replace(config_by_rule(head_shape()), **changes))),
            f"entry 1: {name}: got {2**16}, wants at most",
        )
        for name, changes in {
            "block_a": {"block_c": 16, "block_p": 2, "block_a": 2**16},
            "block_f": {"waits": False, "block_n": 32, "block_f": 2**16, "block_k": 16},
        }.items()
    },
    "parts of a maximum": (
        changed_table("entries", 1, "config", "window_parts", to=2),
        "entry 2: window_parts: got 2, wants 1",
    ),
    "serves others only": (changed_table("entries", 0, "serves", to=[2, 4]), "entry 1: serves: got [2, 4], wants"),
    "twice the same": (
        table(*2 * [entry(head_shape())]).as_text(),
        "entry 2: shape: got 'batch 1, 64x1x3136, avg, 10 classes, float16, channels_last', wants no",
    ),
}


@pytest.mark.parametrize("text, message", BAD.values(), ids=BAD)
def test_a_bad_file_is_named_with_its_entry(text, message, tables):
    path = tables / "cpu.json"
    path.write_text(text)
    with pytest.raises(BadTable, match=re.escape(message)) as caught:
        read_table(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("keys", [("schema",), ("entries", 0, "serves"), (*CONFIG, "block_c"), (*CONFIG, "x" * 9999)])
def test_a_message_does_not_repeat_all_of_a_long_value(keys, tables):
    path = tables / "cpu.json"
    path.write_text(changed_table(*keys, to="é" * 10_000))
    with pytest.raises(BadTable) as caught:
        read_table(path)
    assert len(str(caught.value).replace(str(path), "")) < 400


SMALLEST_TILES = {
    "block_n": 16, "block_f": 16, "block_k": 16, "num_warps": 32, "max_registers": 32, "max_programs": 1, "waits": False
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"max_registers": 32, "max_programs": 1, "num_warps": 32},
        {"max_registers": 0, "max_programs": 0, "num_warps": 1, "waits": True},
        SMALLEST_TILES,
        {**SMALLEST_TILES, "weight_buffers": 2},
        {**SMALLEST_TILES, "block_n": 1, "max_registers": 255},
    ],
    ids=str,
)
def test_the_least_and_most_that_a_field_may_be_is_read(changes, tables):
    config = dataclasses.replace(config_by_rule(head_shape()), **changes)
    path = write(tables, table(entry(head_shape(), config=config)))
    assert read_table(path).entries[0].config == config


@pytest.mark.parametrize(
    "config, shape",
    [
        (PACKED, TURNED),
        (PACKED, head_shape()),
        (dataclasses.replace(PACKED, block_j=4), TURNED),
        (IN_PLACE, TURNED),
        (dataclasses.replace(IN_PLACE, block_c=1, block_p=128), TURNED._replace(layout="contiguous")),
        (dataclasses.replace(IN_PLACE, block_c=128, block_p=1), head_shape((32, 1, 1))),
    ],
)
def test_heads_that_read_features_in_memory(config, shape, tables):
    assert read_table(write(tables, table(entry(shape, config=config)))).entries[0].config == config


@pytest.mark.parametrize("name", ["features", "last_rows"])
def test_what_a_table_written_before_does_not_say(name, tables):
    (tables / FILE_NAME).write_text(changed_table(*CONFIG, name, without=True))
    assert read_table(tables / FILE_NAME).entries[0].config == config_by_rule(head_shape())


def test_a_file_that_is_not_there_or_that_of_another_device(tables):
    with pytest.raises(BadTable, match="cannot be read"):
        read_table(tables / FILE_NAME)
    assert table_of(DEVICE) is None and lookup(DEVICE, head_shape()) is None
    assert table_path(DEVICE) == tables / FILE_NAME and tuned_devices() == []
    write(tables, table(), "nvidia-h200.json")
    assert tuned_devices() == ["nvidia-h200"]
    with pytest.raises(BadTable, match="device: got 'ACME X-1 80GB', wants"):
        table_of("NVIDIA H200")


def test_a_table_of_an_earlier_kernel_is_not_used(tables):
    """Not even read: configurations may have had other fields."""
    old = json.loads(table(entry(head_shape()), kernel="0" * 16).as_text())
    del old["entries"][0]["config"]["stages"]
    (tables / FILE_NAME).write_text(json.dumps(old))
    assert lookup(DEVICE, head_shape()) is None
    assert table_of(DEVICE).kernel == "0" * 16


def test_every_key_but_the_batch_must_be_the_same(tables):
    shape = head_shape(TAPS[3], 8, classes=100)
    write(tables, table(entry(shape, config=other(shape), serves=(1, 64))))
    assert lookup(DEVICE, shape) == other(shape)
    assert lookup("ACME X-2", shape) is None
    for name, value in shape._asdict().items():
        changed = {"layout": "contiguous", "pool": "max", "dtype": "bfloat16"}.get(name) or value + 1
        found = lookup(DEVICE, shape._replace(**{name: changed}))
        assert (found == other(shape)) == (name == "samples"), name


@pytest.mark.parametrize(
    "samples, taken",
    [(1, 8), (16, 8), (17, 32), (64, 32), (65, None), (128, 128), (200, None)],
)
def test_batches_in_between_take_the_nearest_that_was_measured_to_serve_them(samples, taken, tables):
    ranges = {8: (1, 16), 32: (9, 64), 128: (128, 128)}
    shape = head_shape()
    configs = {batch: other(shape, block_c=batch) for batch in ranges}
    entries = [entry(shape._replace(samples=b), config=configs[b], serves=ranges[b]) for b in ranges]
    write(tables, table(*entries))
    found = lookup(DEVICE, shape._replace(samples=samples))
    assert found == (None if taken is None else configs[taken])


def test_the_nearest_batch_is_that_of_the_smaller_ratio(tables):
    shape = head_shape()
    configs = {batch: other(shape, block_c=batch) for batch in (4, 32)}
    write(tables, table(*(entry(shape._replace(samples=b), config=configs[b], serves=(1, 64)) for b in configs)))
    nearest = {samples: lookup(DEVICE, shape._replace(samples=samples)) for samples in (1, 11, 12, 16, 64)}
    assert nearest == {
        samples: configs[4 if samples < 12 else 32] for samples in nearest
    }  # 11 / 4 and 32 / 12 are less


@pytest.mark.parametrize("samples, served", [(64, True), (33, True), (32, False), (16, False)])
def test_no_group_that_is_mostly_empty(samples, served, tables):
    shape = head_shape(samples=128, classes=1000)
    tiles = dataclasses.replace(config_by_rule(shape), block_n=64)
    write(tables, table(entry(shape, config=tiles, serves=(16, 128))))
    assert (lookup(DEVICE, shape._replace(samples=samples)) == tiles) == served


# Damaged files are read, or refused in one line

WHOLE = table(
    entry(head_shape()), entry(head_shape(TAPS[1], pool="max")), entry(head_shape(TAPS[3], 32, classes=1000))
).as_text()


def test_any_damage(tmp_path):
    path, found = tmp_path / "cpu.json", []
    for seed in range(300):
        dice = random.Random(seed)
        content = damaged_bytes(WHOLE.encode(), dice) if seed % 3 else damaged_json(json.loads(WHOLE), dice)
        found.append(read_damaged(path, content, lambda: read_table(path), BadTable, path))
    kept = [one for one in found if one is not None]
    assert 2 < len(kept) < 100
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
