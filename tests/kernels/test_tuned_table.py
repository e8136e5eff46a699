"""Tuned tables: what a head is to them, what a file must hold, and which entry serves which head."""

import contextvars
import dataclasses
import importlib
import json
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch, LaunchConfig, fused_head, runs_triton
from auxhead.kernels.head_shape import HeadShape
from auxhead.kernels.head_view import HeadView, head_view
from auxhead.kernels.kernel_hash import KERNEL_SOURCES, _code, kernel_hash
from auxhead.kernels.tuned_table import (
    BadTable,
    lookup,
    overriding,
    read_table,
    table_of,
    table_path,
    tuned_devices,
)
from hypothesis import given
from hypothesis import strategies as st
from support.example_tables import DEVICE, FILE_NAME, TAPS, entry, head_shape, map_strides, table
from support.head_cases import check_head, make_head, readable

CPU = torch.device("cpu")


def other(shape, **changed):
    """A configuration that the rule would not choose."""
    return dataclasses.replace(shape.by_rule(), **{"num_warps": 2, **changed})


# --- what a head is


@pytest.mark.parametrize("layout", ["channels_last", "contiguous"])
@pytest.mark.parametrize("tap", TAPS, ids=readable)
def test_shape_of_a_tap(tap, layout):
    channels, height, width = tap
    shape = head_shape(tap, 8, classes=1000, layout=layout, pool="max", dtype=torch.bfloat16)
    assert shape == (8, channels, 1, height * width, 1, 1, layout, "max", 1000, "bfloat16")


NAMED = {
    "tokens": ((2, 5, 8), (40, 8, 1), "avg", "channels_last"),
    "pooled vectors": ((2, 8), (8, 1), "avg", "channels_last"),
    "every second feature": ((2, 8), (16, 2), "avg", "strided"),
    "flattened map": ((2, 8, 3, 3), (72, 9, 3, 1), "none", "channels_last"),
    "NCHW whose columns are cut": ((2, 8, 3, 3), (96, 12, 4, 1), "avg", "contiguous"),
    "every second column": ((2, 8, 3, 3), (144, 18, 6, 2), "avg", "strided"),
    "one channel, NCHW": ((2, 1, 3, 3), (9, 9, 3, 1), "avg", "contiguous"),
    "one channel, channels_last": ((2, 1, 3, 3), (9, 1, 3, 1), "avg", "contiguous"),
    "1x1 NCHW": ((2, 8, 1, 1), (8, 1, 1, 1), "avg", "channels_last"),
    "1x1 channels_last": ((2, 8, 1, 1), (8, 1, 8, 8), "avg", "channels_last"),
    "one element": ((2, 1, 1, 1), (1, 1, 1, 1), "avg", "channels_last"),
}


@pytest.mark.parametrize("shape, strides, pool, layout", NAMED.values(), ids=NAMED)
def test_layout_is_that_of_the_memory(shape, strides, pool, layout):
    view = head_view(shape, strides, pool, (1, 1))
    assert HeadShape.of(view, 10, pool_max=False, dtype=torch.float32).layout == layout


@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(1, 9), st.integers(1, 9)),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    layout=st.sampled_from(["channels_last", "contiguous"]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    pool_max=st.booleans(),
)
def test_a_shape_stands_for_its_view(sizes, grid, layout, dtype, pool_max):
    """What tools make of a shape alone is what a call with that input would get."""
    view = HeadView(sizes, map_strides(sizes, layout), *grid)
    shape = HeadShape.of(view, 7, pool_max=pool_max, dtype=dtype)
    assert HeadShape.of(shape.view, 7, pool_max=pool_max, dtype=dtype) == shape
    assert shape.by_rule() == LaunchConfig.by_rule(view, 7, pool_max=pool_max, element_size=dtype.itemsize)
    strided = shape._replace(channels=2, layout="strided")
    assert HeadShape.of(strided.view, 7, pool_max=pool_max, dtype=dtype) == strided


# --- files


def write(folder, made, name=FILE_NAME):
    path = folder / name
    path.write_text(made.as_text())
    return path


def test_round_trip_an_entry_a_line_sorted(tables):
    entries = [
        entry(head_shape(tap, samples, classes=classes, layout=layout), place=place, serves=(samples, 2 * samples))
        for place in ("network", "alone")
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
    assert [one.shape.samples for one in found.entries[:4]] == [8, 8, 32, 32], "batch sizes of one head are neighbours"
    assert json.loads(path.read_text())["entries"][0]["shape"]["channels"] == 64


def changed_table(*keys, to=None, without=False):
    """A good table as JSON, with the value at ``keys`` changed or left out."""
    values = json.loads(table(entry(head_shape()), entry(head_shape(TAPS[1], pool="max"))).as_text())
    inner = values
    for key in keys[:-1]:
        inner = inner[key]
    if without:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = to
    return json.dumps(values)


CONFIG = ("entries", 0, "config")
BAD = {
    "no JSON": ("{", "is not JSON"),
    "a list": ("[]", "schema: got None, wants 'auxhead tuned 1'"),
    "another schema": (changed_table("schema", to="auxhead tuned 2"), "schema: got 'auxhead tuned 2', wants"),
    "no device": (changed_table("device", without=True), "table: missing device, wants"),
    "a field more": (changed_table("host", to="x"), "table: unknown host, wants"),
    "no SMs": (changed_table("sm_count", to=0), "sm_count: got 0, wants"),
    "a version that is a number": (changed_table("cudnn", to=91900), "cudnn: got 91900, wants text or null"),
    "entries by name": (changed_table("entries", to={}), "entries: got {}, wants a list"),
    "another place": (changed_table("entries", 0, "place", to="x"), "entry 1: place: got 'x', wants one of alone"),
    "no channels": (changed_table("entries", 1, "shape", "channels", to=0), "entry 2: channels: got 0, wants"),
    "a shape without layout": (changed_table("entries", 0, "shape", "layout", without=True), "entry 1: shape: missing"),
    "another dtype": (changed_table("entries", 0, "shape", "dtype", to="int8"), "entry 1: dtype: got 'int8', wants"),
    "no power of two": (changed_table(*CONFIG, "block_c", to=3), "entry 1: block_c: got 3, wants a power of two"),
    "a float": (changed_table(*CONFIG, "block_c", to=4.0), "entry 1: block_c: got 4.0, wants a power of two"),
    "true": (changed_table(*CONFIG, "stages", to=True), "entry 1: stages: got True, wants a power of two"),
    "a cap below zero": (changed_table(*CONFIG, "max_programs", to=-1), "entry 1: max_programs: got -1, wants"),
    "an unknown field": (changed_table(*CONFIG, "block_z", to=1), "entry 1: config: unknown block_z, wants"),
    "a missing field": (changed_table(*CONFIG, "max_registers", without=True), "config: missing max_registers, wants"),
    "too many warps": (changed_table(*CONFIG, "num_warps", to=64), "entry 1: num_warps: got 64, wants at most 32"),
    "one buffer": (changed_table(*CONFIG, "weight_buffers", to=1), "entry 1: weight_buffers: got 1, wants 0, or 2 to"),
    "too few registers": (
        changed_table(*CONFIG, "max_registers", to=27),
        "entry 1: max_registers: got 27, wants 0 for",
    ),
    "buffers of single samples": (
        changed_table(*CONFIG, "weight_buffers", to=3),
        "entry 1: weight_buffers: got 3, wants 0 where",
    ),
    "tiles of 8 samples": (changed_table(*CONFIG, "block_n", to=8), "entry 1: block_n: got 8, wants 1 where"),
    "tiles of 8 features": (changed_table(*CONFIG, "block_f", to=8), "entry 1: block_f: got 8, wants 1, or 16 or more"),
    **{
        f"tiles with {name} = 8": (
            changed_table(*CONFIG, to=dataclasses.asdict(dataclasses.replace(head_shape().by_rule(), **changes))),
            f"entry 1: {name}: got 8, wants",
        )
        for name, changes in {
            "block_n": {"block_n": 8, "block_f": 64},
            "block_k": {"block_f": 64, "block_k": 8},
        }.items()
    },
    "parts of a maximum": (
        changed_table("entries", 1, "config", "window_parts", to=2),
        "entry 2: window_parts: got 2, wants 1",
    ),
    "serves others only": (changed_table("entries", 0, "serves", to=[2, 4]), "entry 1: serves: got [2, 4], wants"),
    "serves one end": (changed_table("entries", 0, "serves", to=[1]), "entry 1: serves: got [1], wants"),
    "no margin": (changed_table("entries", 0, "margin", to=None), "entry 1: margin: got None, wants a number"),
    "twice the same": (
        table(*2 * [entry(head_shape())]).as_text(),
        "entry 2: shape: got 'batch 1, 64x1x3136, avg, 10 classes, float16, channels_last', wants no",
    ),
}


@pytest.mark.parametrize("text, message", BAD.values(), ids=BAD)
def test_a_bad_file_is_named_with_its_entry_and_never_stops_a_forward(text, message, tables, monkeypatch):
    path = tables / "cpu.json"
    path.write_text(text)
    with pytest.raises(BadTable, match=re.escape(message)) as caught:
        read_table(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)

    shapes = [head_shape(), head_shape(TAPS[1])]
    with pytest.warns(UserWarning, match=re.escape(message)) as warned:
        found = [choose(shape) for shape in shapes]
    assert found == [shape.by_rule() for shape in shapes]
    assert len(warned) == 1, "a single warning, whatever is asked for"


def test_a_file_that_is_not_there_or_that_of_another_device(tables):
    with pytest.raises(BadTable, match="cannot be read"):
        read_table(tables / FILE_NAME)
    assert table_of(DEVICE) is None and lookup(DEVICE, head_shape(), "alone") is None
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
    assert lookup(DEVICE, head_shape(), "alone") is None
    assert table_of(DEVICE).kernel == "0" * 16


# --- which entry serves which head


def test_every_key_but_the_batch_must_be_the_same(tables):
    shape = head_shape(TAPS[3], 8, classes=100)
    write(tables, table(entry(shape, config=other(shape), serves=(1, 64))))
    assert lookup(DEVICE, shape, "alone") == other(shape)
    assert lookup(DEVICE, shape, "network") is None
    assert lookup("ACME X-2", shape, "alone") is None
    for name, value in shape._asdict().items():
        changed = {"layout": "contiguous", "pool": "max", "dtype": "bfloat16"}.get(name) or value + 1
        found = lookup(DEVICE, shape._replace(**{name: changed}), "alone")
        assert (found == other(shape)) == (name == "samples"), name


@pytest.mark.parametrize(
    "samples, taken",
    [(1, 8), (8, 8), (15, 8), (16, 8), (17, 32), (31, 32), (32, 32), (64, 32), (65, None), (128, 128), (200, None)],
)
def test_batches_in_between_take_the_nearest_that_was_measured_to_serve_them(samples, taken, tables):
    ranges = {8: (1, 16), 32: (9, 64), 128: (128, 128)}
    shape = head_shape()
    configs = {batch: other(shape, block_c=batch) for batch in ranges}
    entries = [entry(shape._replace(samples=b), config=configs[b], serves=ranges[b]) for b in ranges]
    write(tables, table(*entries))
    found = lookup(DEVICE, shape._replace(samples=samples), "alone")
    assert found == (None if taken is None else configs[taken])


def test_a_tie_of_distances_goes_to_the_smaller_batch(tables):
    shape = head_shape()
    configs = {batch: other(shape, block_c=batch) for batch in (8, 32)}
    write(tables, table(*(entry(shape._replace(samples=b), config=configs[b], serves=(8, 32)) for b in (32, 8))))
    assert lookup(DEVICE, shape._replace(samples=16), "alone") == configs[8]


@pytest.mark.parametrize("samples, served", [(64, True), (33, True), (32, False), (16, False)])
def test_no_group_that_is_mostly_empty(samples, served, tables):
    shape = head_shape(samples=128, classes=1000)
    tiles = dataclasses.replace(shape.by_rule(), block_n=64)
    write(tables, table(entry(shape, config=tiles, serves=(16, 128))))
    assert (lookup(DEVICE, shape._replace(samples=samples), "alone") == tiles) == served


# --- choosing


def choose(shape, place="alone", device=CPU):
    return LaunchConfig.choose(
        shape.view,
        shape.classes,
        pool_max=shape.pool == "max",
        dtype=getattr(torch, shape.dtype),
        device=device,
        place=place,
    )


def test_the_table_comes_before_the_rule(tables, monkeypatch):
    shape, missing = head_shape(classes=1000), head_shape(classes=999)
    write(tables, table(entry(shape, config=other(shape), place="network")))
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda asked: {device: DEVICE}[asked])
    assert choose(shape, "network", device) == other(shape)
    assert choose(shape, "alone", device) == shape.by_rule()
    assert choose(missing, "network", device) == missing.by_rule()
    assert choose(shape, "network") == shape.by_rule(), "another device"


def test_a_choice_is_remembered(tables, monkeypatch):
    shape = head_shape()
    write(tables, table(entry(shape, config=other(shape)), device="cpu"), "cpu.json")
    assert choose(shape) == other(shape)
    monkeypatch.setattr(importlib.import_module("auxhead.kernels.tuned_table"), "lookup", None)
    assert choose(shape) == other(shape), "without asking the table again"


def test_overrides_come_first_and_are_forgotten(tables):
    shape, elsewhere = head_shape(), head_shape(TAPS[1])
    write(tables, table(entry(shape, config=other(shape)), device="cpu"), "cpu.json")
    forced, inner = other(shape, num_warps=1), other(shape, num_warps=8)
    assert choose(elsewhere) == elsewhere.by_rule()  # remembered before anything is overridden
    with overriding({(shape, "alone"): forced, (elsewhere, "network"): inner}):
        assert choose(shape) == forced and lookup("any device", shape, "alone") == forced
        assert choose(elsewhere) == elsewhere.by_rule() and choose(elsewhere, "network") == inner
        with overriding({(elsewhere, "alone"): inner}):
            assert choose(shape) == forced and choose(elsewhere) == inner
        assert choose(elsewhere) == elsewhere.by_rule()
    assert choose(shape) == other(shape) and choose(elsewhere, "network") == elsewhere.by_rule()
    with pytest.raises(RuntimeError, match="stop"), overriding({(shape, "alone"): forced}):
        raise RuntimeError("stop")
    assert choose(shape) == other(shape)


def test_overrides_are_those_of_a_thread(tables):
    shape = head_shape()
    found = []
    with overriding({(shape, "alone"): other(shape)}):
        thread = threading.Thread(target=lambda: found.append(choose(shape)), name="other")
        thread.start()
        thread.join()
        inherited = contextvars.copy_context().run(choose, shape)
    assert found == [shape.by_rule()] and inherited == other(shape)


@pytest.mark.parametrize("place", ["alone", "network"])
def test_a_head_is_launched_as_the_table_says_of_its_place(place, tables, device, monkeypatch):
    x, weight, bias = make_head((3, 12, 5, 4), 7, device=device)
    if not runs_triton(x):
        pytest.skip("needs the kernel")
    shape = HeadShape.of(head_view(x.shape, x.stride(), "avg", (1, 1)), 7, pool_max=False, dtype=x.dtype)
    tuned = dataclasses.replace(shape.by_rule(), block_c=2, block_a=2, num_warps=1)
    assert tuned != shape.by_rule()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    write(tables, table(entry(shape, config=tuned, place=place), device=name), table_path(name).name)
    used, programs = [], LaunchConfig.programs
    monkeypatch.setattr(LaunchConfig, "programs", lambda *arguments: used.append(arguments[0]) or programs(*arguments))

    check_head(x, weight, bias)
    alone, expected = set(used), fused_head(x, weight, bias)
    used.clear()
    one = torch.ones(1, device=device)
    buffers = ExitBuffers.allocate(1, 3, 7, with_probs=True, device=device)
    ExitLaunch(buffers, 0, [ExitHead(weight, bias, one, one, "avg", (1, 1))])([x])
    assert (alone, set(used)) == (({tuned}, {shape.by_rule()}) if place == "alone" else ({shape.by_rule()}, {tuned}))
    assert torch.equal(buffers.label[0], expected.label)


# --- the kernels' name


def test_kernel_hash_changes_with_code_alone(tmp_path, monkeypatch):
    module = importlib.import_module("auxhead.kernels.kernel_hash")
    sources = {name: (Path(module.__file__).parent / name).read_text() for name in KERNEL_SOURCES}
    assert re.fullmatch("[0-9a-f]{16}", kernel_hash())
    monkeypatch.setattr(module, "__file__", str(tmp_path / "kernel_hash.py"))

    def hash_of(changed):
        for name, source in {**sources, **changed}.items():
            (tmp_path / name).write_text(source)
        return kernel_hash.__wrapped__()

    assert hash_of({}) == kernel_hash()
    for name, source in sources.items():
        assert hash_of({name: source + "\n\n# why\n"}) == kernel_hash(), name
        assert hash_of({name: source + "\nx = 1\n"}) != kernel_hash(), name


SAME_CODE = {
    "comments and blank lines": ("a = 1\n\n\n# why\nb = 2  # what\n", "a = 1\nb = 2\n"),
    "docstrings": ('"""One\nor two."""\ndef f():\n    """Three."""\n    return 1\n', "def f():\n    return 1\n"),
    "a comment inside a call": ("f(\n    1,  # one\n)\n", "f(\n    1,\n)\n"),
}
OTHER_CODE = {
    "a string that is a value": ('a = "# no comment"\n', 'a = ""\n'),
    "the end of a block": ("if a:\n    b\n    c\n", "if a:\n    b\nc\n"),
    "a part of a name": ("a b\n", "ab\n"),
    "an f-string": ('a = f"{b + 1}"\n', 'a = f"{b + 2}"\n'),
}


@pytest.mark.parametrize("one, two", SAME_CODE.values(), ids=SAME_CODE)
def test_same_code(one, two):
    assert _code(one) == _code(two)


@pytest.mark.parametrize("one, two", OTHER_CODE.values(), ids=OTHER_CODE)
def test_other_code(one, two):
    assert _code(one) != _code(two)


def test_no_warning_where_there_is_no_table(tables):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(head_shape()) == head_shape().by_rule()
