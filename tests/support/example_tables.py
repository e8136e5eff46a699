"""Tuned tables, their entries and head shapes, of a device that does not exist."""

import dataclasses

import torch
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.kernel_hash import kernel_hash
from auxhead.kernels.launch.launch_rule import config_by_rule
from auxhead.kernels.launch.tuned_table import Entry, TunedTable, tables_for

DEVICE = "ACME X-1 80GB"
FILE_NAME = "acme-x-1-80gb.json"
#: Taps of ResNet-18.
TAPS = [(64, 56, 56), (128, 28, 28), (256, 14, 14), (512, 7, 7)]


def map_strides(shape, layout):
    """Strides of a map [N, C, H, W] as PyTorch lays it out."""
    _, channels, height, width = shape
    sample = channels * height * width
    if layout == "channels_last":
        return (sample, 1, width * channels, channels)
    return (sample, height * width, width, 1)


def head_shape(tap=TAPS[0], samples=1, *, classes=10, layout="channels_last", pool="avg", dtype=torch.float16):
    """A head with global pooling."""
    shape = (samples, *tap)
    view = head_view(shape, map_strides(shape, layout), pool, (1, 1))
    return HeadShape.of(view, classes, pool_max=pool == "max", dtype=dtype)


def entry(shape, *, config=None, serves=None, margin=0.1):
    return Entry(shape, config or config_by_rule(shape), serves or (shape.samples, shape.samples), margin)


def table(*entries, **changed):
    values = {
        "device": DEVICE,
        "sm_count": 100,
        "capability": "9.0",
        "kernel": kernel_hash(),
        "triton": "3.6.0",
        "torch": "2.11.0",
        "cuda": "13.0",
        "cudnn": "91900",
        "driver": "580",
        "commit": None,
    }
    return TunedTable(**{**values, **changed}, entries=entries)


def write(folder, made, name=FILE_NAME):
    path = folder / name
    path.write_text(made.as_text())
    return path


def other(shape, **changed):
    """A configuration that the rule would not choose."""
    return dataclasses.replace(config_by_rule(shape), **{"num_warps": 1, **changed})


def lookup(device_name, shape):
    """The configuration tuned for a head on a device, or None."""
    tables, _ = tables_for(device_name)
    found = [entry for table in tables if (entry := table.find(shape)) is not None]
    return found[0].config if found else None
