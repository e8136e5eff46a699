"""Chooses a head's LaunchConfig: an override, else the tuned table that serves the device, else the launch rule."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from ..reference.hidden_layers import NO_LAYERS, HiddenLayers
from .head_shape import HeadShape
from .head_view import HeadView
from .launch_config import LaunchConfig, next_power_of_2
from .launch_rule import config_beside_trunk, config_by_rule, config_of_norm, config_of_reading
from .library_rule import config_of_library, library_pays
from .tuned_table import table_of, tables_for

#: Configurations that come before the tables, by shape, in the current context; see ``overriding``.
overrides: ContextVar[Mapping[HeadShape, LaunchConfig] | None] = ContextVar("overrides", default=None)

#: Elements of a last layer behind a hidden one, padded, beyond which programs of its own multiply it.
_LARGE_LAST_LAYER = 16384


def choose_config(
    view: HeadView, classes: int, *, pool_max: bool, dtype: torch.dtype, device: torch.device,
    hidden: HiddenLayers = NO_LAYERS, beside_trunk: bool = False,
) -> LaunchConfig:  # fmt: skip
    """Choose how a head is launched; every launch asks, so that what table or rule say is remembered.

    A table that cannot be read, or is of other kernels, is warned of once, and is none. Table and rule know the linear
    layer alone that reads the features, and what they say is then fitted to the others: a norm wants tiles of one
    sample or features in memory; a program that decides has all hidden features at once; and a large last layer gets
    programs of its own. A library may multiply instead, by the rule or, of one linear layer, by a table.

    Args:
        view: the input as the kernel reads it.
        classes: K.
        pool_max: whether windows are reduced to their maximum.
        dtype: of x and weight.
        device: of x.
        hidden: layers before the last one.
        beside_trunk: whether a runner launches it, whose trunk wants room, too: see ``config_beside_trunk``.
    """
    rows, forced = hidden.rows(classes), overrides.get()
    layers = Layers(classes, hidden.weight is not None, hidden.eps is not None)
    if forced is not None:
        shape = HeadShape.of(view, rows, pool_max=pool_max, dtype=dtype)
        if (config := forced.get(shape)) is not None:
            return _fitted(config, shape, layers)
    return _tuned_or_by_rule(view, rows, layers, pool_max, dtype, device, beside_trunk)


class Layers(NamedTuple):
    """Layers of a head, as far as a configuration is fitted to them: K classes, a hidden linear layer, a norm."""

    classes: int
    hidden: bool = False
    norms: bool = False


def _fitted(config: LaunchConfig, shape: HeadShape, layers: Layers) -> LaunchConfig:
    """Return a configuration of one linear layer as a head wants it that has others, too."""
    if config.by_library:
        return config
    if layers.norms and not (config.reads or config.tiled and config.block_n == 1):
        config = config_of_norm(shape)
    if layers.norms and config.in_place and shape.view.turned:
        config = config_of_reading(shape, "packed")
    if layers.hidden:
        # few warps hand hidden features over sooner (seen on an H100, in no record)
        block_j, warps = max(config.block_j, next_power_of_2(shape.classes)), min(config.num_warps, 4)
        # Tensor cores round each sum toward zero: of 512 products of float32 in one step logits are six times as far
        # off as of 64 (by a model of them; on an H100 one answer was called wrong). So tiles multiply, in steps of 64.
        inexact = shape.element_size == 4 and block_j > 64 and layers.classes > 16
        large = inexact or block_j * next_power_of_2(layers.classes) > _LARGE_LAST_LAYER
        config = replace(config, block_j=block_j, num_warps=warps, last_rows=config.last_rows or (64 if large else 0))
    return config


@contextmanager
def overriding(configs: Mapping[HeadShape, LaunchConfig]) -> Iterator[None]:
    """Let heads of some shapes be launched as given, in this thread, until the block ends.

    They are added to those of an enclosing block. A runner keeps what it was captured with.
    """
    token = overrides.set({**(overrides.get() or {}), **configs})
    try:
        yield
    finally:
        overrides.reset(token)


@lru_cache(maxsize=4096)
def _tuned_or_by_rule(
    view: HeadView, rows: int, layers: Layers, pool_max: bool, dtype: torch.dtype, device: torch.device, beside: bool
) -> LaunchConfig:
    shape, name = HeadShape.of(view, rows, pool_max=pool_max, dtype=dtype), name_of(device)
    tables, unused = tables_for(name)
    for why in unused:
        _warn(why)
    entry = next((found for table in tables if (found := table.find(shape)) is not None), None)
    if entry is None or (entry.config.by_library and layers != Layers(shape.classes)):
        config = chosen_by_rule(shape, layers)
    else:
        config = _fitted(entry.config, shape, layers)
    # a norm's statistics are of all features, for which each tile of one sample waits: it is not split
    return _fitted(config_beside_trunk(shape, config), shape, layers) if beside and not layers.norms else config


def chosen_by_rule(shape: HeadShape, layers: Layers | None = None, *, may_use_library: bool = True) -> LaunchConfig:
    """Choose for a head of which no table knows; ``layers`` None: it is one linear layer."""
    layers = layers or Layers(shape.classes)
    config = _fitted(config_by_rule(shape), shape, layers)
    if may_use_library and library_pays(shape, config, layers.classes, hidden=layers.hidden, norms=layers.norms):
        return config_of_library(shape, layers.classes)
    return config


def forget_tables() -> None:
    """Let launches from now on go by tables as they are now; whoever writes one calls this."""
    table_of.cache_clear()
    _tuned_or_by_rule.cache_clear()


def name_of(device: torch.device) -> str:
    """Return the name by which a device has a table."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@lru_cache
def _warn(message: str) -> None:
    """Warn once of each thing, whatever the filters."""
    warnings.warn(f"{message}; launches go by what is left: a table that it borrows, or the rule", stacklevel=2)
