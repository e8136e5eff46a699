"""auxhead-tune explain: the launch configuration of a head, and why."""

import dataclasses

import pytest
import torch
from auxhead.autotune.tuned.explain import explain
from auxhead.kernels.launch import tuned_table
from auxhead.kernels.launch.kernel_hash import kernel_hash
from auxhead.kernels.launch.launch_config import LaunchConfig
from auxhead.kernels.launch.launch_rule import config_by_rule
from support.command_line import assert_one_line_error, tune
from support.example_tables import DEVICE, FILE_NAME, TAPS, entry, head_shape, lookup, table


def other(shape):
    return dataclasses.replace(config_by_rule(shape), num_warps=1)


@pytest.fixture
def tuned(tables):
    """A table for two taps, 10 and 100 classes and batches of 1, 8 and 32, of which 8 serves up to 16."""
    entries = [
        entry(shape, config=other(shape), serves=(samples, 16 if samples == 8 else samples))
        for tap in TAPS[:2]
        for classes in (10, 100)
        for samples in (1, 8, 32)
        for shape in [head_shape(tap, samples, classes=classes)]
    ]
    (tables / FILE_NAME).write_text(table(*entries).as_text())
    return tables


def test_an_entry_of_its_own(tuned):
    shape = head_shape(TAPS[1], 8, classes=100)
    found = explain(DEVICE, shape)
    assert (found.missed, found.entry.shape, found.config) == ((), shape, other(shape))
    assert (
        f"  used: its own entry, 10.0% less time on {DEVICE} than what the rule said when it was measured"
        in found.lines()
    )


def test_a_head_of_two_launches_is_named(tables):
    packed = LaunchConfig(8, 16, 8, 1, 128, 16, 1, 16, 1, 1, 4, weight_buffers=2, features="packed")
    (tables / FILE_NAME).write_text(table(entry(head_shape(), config=packed)).as_text())
    way, fields = explain(DEVICE, head_shape()).lines()[-2:]
    assert way == "  way: read, packed: one launch pools, and another one multiplies and decides"
    assert "features=packed" in fields


def test_a_neighbour(tuned):
    asked = head_shape(samples=12)
    found = explain(DEVICE, asked)
    assert found.missed == ("samples: 12 asked, table has 1, 8 (serves 8 to 16), 32",)
    assert found.entry.shape.samples == 8 and found.config == other(head_shape(samples=8))
    assert found.lines()[2] == (
        "  used: the entry of batch 8, which serves batch 8 to 16: "
        "at both it was measured to lose at most 1 % to the winner"
    )


MISSED = [
    (head_shape(samples=24), ["samples: 24 asked, table has 1, 8 (serves 8 to 16), 32"]),
    (head_shape(classes=1000), ["classes: 1000 asked, table has 10, 100"]),
    (head_shape(layout="contiguous"), ["layout: contiguous asked, table has channels_last"]),
    (head_shape(pool="max"), ["pool: max asked, table has avg"]),
    (head_shape(dtype=torch.float32), ["dtype: float32 asked, table has float16"]),
    (head_shape((65, 56, 56)), ["channels: 65 asked, table has 64"]),
    (
        head_shape(TAPS[3]),
        ["channels: 512 asked, table has 64, 128", "width: 49 asked, table has 784, 3136"],
    ),
    (
        head_shape(TAPS[1], classes=7, layout="contiguous"),
        ["layout: contiguous asked, table has channels_last", "classes: 7 asked, table has 10, 100"],
    ),
]  # fmt: skip


def test_the_key_that_differs(tuned):
    for shape, missed in MISSED:
        found = explain(DEVICE, shape)
        assert list(found.missed) == missed
        assert found.entry is None and found.config == config_by_rule(shape)
        lines = found.lines()
        assert "  used: the rule's configuration" in lines
        fields = dataclasses.asdict(config_by_rule(shape))
        assert all(f"{name}={value}" in lines[-1].split() for name, value in fields.items())


def test_a_batch_size_that_lacks_is_named_and_not_the_dtype_of_others(tables):
    shapes = [head_shape(samples=8)._replace(dtype="float16"), *(head_shape(samples=n) for n in (1, 32))]
    shapes[1:] = [one._replace(dtype="float32") for one in shapes[1:]]
    (tables / FILE_NAME).write_text(table(*[entry(one, config=other(one)) for one in shapes]).as_text())
    found = explain(DEVICE, head_shape(samples=8)._replace(dtype="float32"))
    assert found.missed == ("samples: 8 asked, table has 1, 32",)


def test_no_table(tables):
    shape = head_shape()
    found = explain("ACME Y", shape)
    assert found.missed == (
        "device: no table for ACME Y, there is none at all; `auxhead-tune everything` makes one there",
    )
    assert found.config == config_by_rule(shape)
    for name in ("nvidia-h200", "acme-x"):
        (tables / f"{name}.json").touch()
    assert explain("ACME Z", shape).missed == (
        "device: no table for ACME Z, there are tables for acme-x, nvidia-h200; "
        "`auxhead-tune everything` makes one there",
    )


def test_a_table_of_another_kernel_and_one_without_entries(tables):
    shape = head_shape()
    (tables / FILE_NAME).write_text(table(entry(shape, config=other(shape)), kernel="0" * 16).as_text())
    found = explain(DEVICE, shape)
    why = f"tuned for another kernel, {'0' * 16}; the one here is {kernel_hash()}: run auxhead-tune everything there"
    assert found.unused == (f"{tables / FILE_NAME}, of {DEVICE}: {why}",) and found.missed == ()
    assert found.config == config_by_rule(shape)
    assert f"  not used: {found.unused[0]}" in found.lines() and "  used: the rule's configuration" in found.lines()
    (tables / "acme-y.json").write_text(table(device="ACME Y").as_text())
    assert explain("ACME Y", shape).missed == ("entries: the table has none",)


# --- the command


def explained(*arguments):
    return tune("explain", *arguments)


def test_a_table_that_is_borrowed(tuned, monkeypatch):
    """By a device that has no entry of its own for the head."""
    monkeypatch.setattr(tuned_table, "BORROWERS", {"other-gpu": DEVICE})
    shape = head_shape(samples=8)
    found = explain("Other GPU", shape)
    assert found.config == other(shape)
    assert found.lines()[0] == f"{shape}, on Other GPU, which borrows the table of {DEVICE}"
    assert lookup("Other GPU", shape) == other(shape)
    assert explain("other-gpu", shape).config == other(shape), "by the name of its file"
    own = table(entry(head_shape(TAPS[3], samples=2)), device="Other GPU")
    (tuned / tuned_table.table_path("Other GPU").name).write_text(own.as_text())
    tuned_table.table_of.cache_clear()
    assert lookup("Other GPU", shape) == other(shape), "its own table has no such head"
    assert explain("Other GPU", shape).lines()[0] == f"{shape}, on Other GPU, which borrows the table of {DEVICE}"
    its = head_shape(TAPS[3], samples=2)
    assert explain("Other GPU", its).lines()[0] == f"{its}, on Other GPU"
    for asked, has, whose in ((300, "1, 8", f", which borrows the table of {DEVICE}"), (3, "2", "")):
        found = explain("Other GPU", head_shape(TAPS[0] if asked == 300 else TAPS[3], samples=asked))
        assert found.device == f"Other GPU{whose}", "that of the nearest entry"
        assert [line.split(":")[0] for line in found.missed] == ["samples"] and f"table has {has}" in found.missed[0]
    (tuned / FILE_NAME).write_text("{")
    tuned_table.table_of.cache_clear()
    left = explain("Other GPU", its)
    assert left.entry is not None and "is not JSON" in left.unused[0], "as a launch takes what is left"


def test_an_entry_of_its_own_that_serves_comes_before_a_nearer_one_that_is_borrowed(tuned, monkeypatch):
    monkeypatch.setattr(tuned_table, "BORROWERS", {"other-gpu": DEVICE})
    asked, its = head_shape(samples=8), head_shape(samples=4)
    own = table(entry(its, config=dataclasses.replace(other(its), num_warps=2), serves=(4, 8)), device="Other GPU")
    (tuned / tuned_table.table_path("Other GPU").name).write_text(own.as_text())
    assert explain("Other GPU", asked).config == lookup("Other GPU", asked) == own.entries[0].config
    assert explain("Other GPU", asked).device == "Other GPU"


def test_h100s_borrow_the_table_of_the_h200():
    """Of the same compute capability; no other GPU does."""
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL"):
        assert tuned_table.tables_for(name)[0][-1] is tuned_table.table_of("NVIDIA H200")
    assert tuned_table.tables_for("NVIDIA A100-SXM4-80GB") == ([], [])


def test_what_is_another_in_a_network_is_told(tables):
    shape = head_shape(TAPS[3], 8, classes=1000)
    single = LaunchConfig(1, 32, 1, 16, 64, 64, 1, 1024, 1, 1, 4)
    (tables / FILE_NAME).write_text(table(entry(shape, config=single)).as_text())
    way, fields, in_network, others = explain(DEVICE, shape).lines()[-4:]
    assert (way, in_network) == ("  way: tiled", "  in a network: split")
    assert "block_f=64" in fields.split() and "block_f=1" in others.split()
    *_, in_network, _ = explain(DEVICE, shape._replace(samples=32)).lines()
    assert in_network == "  in a network: read, packed: one launch pools, and another one multiplies and decides"


def test_the_command(tuned):
    done = explained("64x56x56", "128x28x28", "--batch", 8, "--classes", 100, "--device", DEVICE)
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0] == f"batch 8, 64x1x3136, avg, 100 classes, float16, channels_last, on {DEVICE}"
    assert lines[4].startswith("batch 8, 128x1x784, avg, 100 classes") and "num_warps=1" in lines[3]
    assert [line.split(",")[0].strip() for line in lines[1::4]] == 2 * ["used: its own entry"]
    assert lines[2].strip() in ("way: split", "way: tiled")
    both = explained("64x56x56", "--batch", 1, "--batch", 8, "--classes", 100, "--device", DEVICE).output.splitlines()
    assert both[0].startswith("batch 1,") and both[-4:] == lines[:4]
    by_file = explained("64x56x56", "--batch", 8, "--classes", 100, "--device", FILE_NAME.removesuffix(".json"))
    assert by_file.output.splitlines() == lines[:4]


INPUTS = [
    (("64x7x5", "--layout", "contiguous"), "batch 1, 64x1x35, avg, 1000 classes, float16, contiguous, on ACME Y"),
    (("3x4x5", "--pool-size", "2x3", "--pool", "max"), "batch 1, 3x4x5 in 2x3 windows, max, 1000 classes"),
    (
        ("3x4x5", "--layout", "strided", "--dtype", "float32"),
        "batch 1, 3x1x20, avg, 1000 classes, float32, strided",
    ),
    (("197x768",), "batch 1, 768x1x197, avg, 1000 classes, float16, channels_last"),
    (("197x768", "--pool", "first"), "197x768, pool first, is read as\nbatch 1, 768x1x1, avg"),
    (
        ("64x4x4", "--pool", "none", "--layout", "contiguous"),
        "64x4x4, pool none, is read as\nbatch 1, 1024x1x1, avg",
    ),
    (("512",), "batch 1, 512x1x1, avg"),
]


def test_what_the_kernel_makes_of_an_input(tables):
    for arguments, first in INPUTS:
        done = explained(*arguments, "--device", "ACME Y")
        assert done.exit_code == 0 and done.output.startswith(first), done.output


REFUSED = [
    (("0x5x5", "--device", "Y"), "SHAPE: got 0x5x5, wants"),
    (("1x2x3x4", "--device", "Y"), "x: got rank 5"),
    (("512", "--layout", "x", "--device", "Y"), "--layout: got x, wants one of channels_last"),
    (("512", "--pool", "x", "--device", "Y"), "pool: got 'x', wants one of"),
    (("3x4x5", "--pool-size", "2x2x2", "--device", "Y"), "pool_size: got (2, 2, 2), wants"),
    (("99999999999x9x9", "--device", "Y"), "SHAPE: got 99999999999x9x9, wants sizes such as 64x56x56, below 2 ** 31"),
    (
        ("64x1x2147483647", "--device", "Y"),
        "x: got shape [1, 64, 1, 2147483647], of 64 features a sample and 2147483647",
    ),
]


def test_refuses():
    for arguments, message in REFUSED:
        assert_one_line_error(explained(*arguments), message)
