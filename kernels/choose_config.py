"""Chooses a head's LaunchConfig: an override, else the device's tuned table, else the launch rule."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch

from .head_shape import HeadShape
from .head_view import HeadView
from .launch_config import LaunchConfig
from .launch_rule import config_by_rule
from .tuned_table import BadTable, lookup

#: Configurations that come before the tables, by shape and place, in the current context; see ``overriding``.
overrides: ContextVar[Mapping[tuple[HeadShape, str], LaunchConfig] | None] = ContextVar("overrides", default=None)


def choose_config(
    view: HeadView, classes: int, *, pool_max: bool, dtype: torch.dtype, device: torch.device, place: str
) -> LaunchConfig:
    """Choose how a head is launched; every launch asks, so that what table or rule say is remembered.

    A table that cannot be read is warned of once, and the rule decides.

    Args:
        view: the input as the kernel reads it.
        classes: K.
        pool_max: whether windows are reduced to their maximum.
        dtype: of x and weight.
        device: of x.
        place: where the head is launched, one of ``tuned_table.PLACES``.
    """
    forced = overrides.get()
    if forced is not None:
        config = forced.get((HeadShape.of(view, classes, pool_max=pool_max, dtype=dtype), place))
        if config is not None:
            return config
    return _tuned_or_by_rule(view, classes, pool_max, dtype, device, place)


LaunchConfig.choose = staticmethod(choose_config)  # exit_launch asks by this name


@contextmanager
def overriding(configs: Mapping[tuple[HeadShape, str], LaunchConfig]) -> Iterator[None]:
    """Let heads of some shapes and places be launched as given, in this thread, until the block ends.

    They are added to those of an enclosing block. A runner keeps what it was captured with.
    """
    token = overrides.set({**(overrides.get() or {}), **configs})
    try:
        yield
    finally:
        overrides.reset(token)


@lru_cache(maxsize=4096)
def _tuned_or_by_rule(
    view: HeadView, classes: int, pool_max: bool, dtype: torch.dtype, device: torch.device, place: str
) -> LaunchConfig:
    shape = HeadShape.of(view, classes, pool_max=pool_max, dtype=dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    try:
        tuned = lookup(name, shape, place)
    except BadTable as error:  # a forward goes on without it
        _warn(str(error))
        tuned = None
    return config_by_rule(shape) if tuned is None else tuned


@lru_cache
def _warn(message: str) -> None:
    """Warn once of each thing, whatever the filters."""
    warnings.warn(f"{message}; launches are chosen by rule", stacklevel=2)
