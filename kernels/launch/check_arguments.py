"""Checks of a head's arguments; errors name the argument, what it got and what it wants."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..reference.criteria import check_criterion, check_temperature, check_threshold
from ..reference.hidden_layers import NO_LAYERS, HiddenLayers, check_hidden_layers, check_like

#: The dtypes that kernels compute in.
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Pools by the rank of the input. A vector is already pooled: any pool leaves it as it is.
POOLS = ("avg", "max", "first", "none")
POOLS_BY_RANK = {2: POOLS, 3: POOLS, 4: ("avg", "max", "none")}
#: Features of a sample, and elements of a channel, at most: counted in int32, in blocks of up to 2 ** 20.
MOST_COUNTED = 2**31 - 2**20
#: Rows and columns of a grid of windows, at most: their product with themselves is counted in int32.
MOST_WINDOWS = 46340


def head_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """Return the dtypes that heads compute in on a device: those of kernels, and where PyTorch computes, float64.

    A tensor on "meta" stands for one on any device.
    """
    return (*FLOAT_DTYPES, torch.float64) if device.type in ("cpu", "meta") else FLOAT_DTYPES


def head_dtypes_in_words(device: torch.device) -> str:
    """Name the dtypes that heads compute in on a device, for errors."""
    elsewhere = "" if torch.float64 in head_dtypes(device) else "; torch.float64 works on the CPU alone"
    return f"one of {', '.join(map(str, head_dtypes(device)))}{elsewhere}"


def check_pool(pool: str, pool_size: int | Sequence[int]) -> tuple[int, int]:
    """Return the pool size of a head as (height, width); ``ValueError`` for a bad pool or size."""
    if pool not in POOLS:
        raise ValueError(f"pool: got {pool!r}, wants one of {list(POOLS)}")
    pair = tuple(pool_size) if isinstance(pool_size, (tuple, list)) else (pool_size, pool_size)
    if len(pair) != 2 or not all(isinstance(size, int) and size is not True and size > 0 for size in pair):
        raise ValueError(f"pool_size: got {pool_size!r}, wants a positive int or a pair of them")
    if max(pair) > MOST_WINDOWS:
        raise ValueError(f"pool_size: got {pool_size!r}, wants at most {MOST_WINDOWS} rows and columns")
    if pool in ("first", "none") and pair != (1, 1):
        raise ValueError(f"pool_size: got {pool_size!r} with pool={pool!r}, which does not pool: wants 1")
    return pair


def check_input(x: Tensor, pool: str, pool_size: tuple[int, int]) -> int:
    """Return how many features a head with this pool makes of a sample of ``x``; raises if it cannot read x."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}, wants a torch.Tensor")
    if x.ndim not in POOLS_BY_RANK:
        layouts = "[N, C, H, W] (a map), [N, T, D] (tokens) or [N, D] (pooled vectors)"
        raise ValueError(f"x: got rank {x.ndim}, shape {list(x.shape)}, wants {layouts}")
    if pool not in POOLS_BY_RANK[x.ndim]:
        raise ValueError(f"pool: got {pool!r} for x of shape {list(x.shape)}, wants one of {POOLS_BY_RANK[x.ndim]}")
    if x.ndim != 4 and pool_size != (1, 1):
        raise ValueError(f"pool_size: got {pool_size} for x of shape {list(x.shape)}, wants 1: only maps have a grid")
    if 0 in x.shape[1:]:
        raise ValueError(f"x: got shape {list(x.shape)}, wants at least one element a sample")
    if pool == "none" or x.ndim == 2:
        return math.prod(x.shape[1:])
    return x.shape[1] * pool_size[0] * pool_size[1] if x.ndim == 4 else x.shape[2]


def check_countable(x: Tensor, features: int) -> None:
    """Raise ``ValueError`` for more features of a sample, or elements of a channel, than the kernels can count.

    Samples may be larger, and so may batches: offsets are int64.
    """
    positions = math.prod(x.shape[2:]) if x.ndim == 4 else x.shape[1] if x.ndim == 3 else 1  # of tokens each is one
    if max(features, positions) > MOST_COUNTED:
        raise ValueError(
            f"x: got shape {list(x.shape)}, of {features} features a sample and {positions} elements a channel, wants "
            f"at most {MOST_COUNTED} of each"
        )


#: Why there are no heads of one class, and what to write.
ONE_LOGIT = (
    "got one logit, of which softmax says 1 whatever it is; wants two: those of a linear layer with two rows, of which "
    "the first is zeros, say by softmax what a sigmoid says of the second: two = nn.Linear(fc.in_features, 2); "
    "two.weight.data = torch.cat([torch.zeros_like(fc.weight), fc.weight]), its bias alike; labels are 0 and 1, int64"
)


def check_classes(name: str, classes: int) -> None:
    """Raise ``ValueError`` for one logit, as binary classifiers have that are read by a sigmoid, or far too many."""
    if classes == 1:
        raise ValueError(f"{name}: {ONE_LOGIT}")
    if classes > 1 << 26:  # slices of 64 that a block of Triton, 2 ** 20 elements, can hold
        raise ValueError(f"{name}: got {classes} classes, wants at most {1 << 26}")


def check_head_arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, pool: str, pool_size: tuple[int, int], criterion: str,
    hidden: HiddenLayers = NO_LAYERS,
) -> None:  # fmt: skip
    """Raise ``TypeError`` for a dtype of a head's call that does not fit, ``ValueError`` for anything else."""
    if x.dtype not in head_dtypes(x.device):
        raise TypeError(f"x: got {x.dtype} on {x.device}, wants {head_dtypes_in_words(x.device)}")
    features = check_hidden_layers(hidden, check_input(x, pool, pool_size), x)
    if weight.ndim != 2 or weight.shape[0] == 0 or weight.shape[1] != features:
        source = f"x of shape {list(x.shape)} with pool={pool!r} and pool_size={pool_size}"
        if hidden.weight is not None:
            source = f"hidden.weight of shape {list(hidden.weight.shape)}"
        raise ValueError(
            f"weight: got shape {list(weight.shape)}, wants [num_classes, {features}]: {source} has {features} "
            f"features a sample"
        )
    check_classes("weight", weight.shape[0])
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: got shape {list(bias.shape)}, wants [{weight.shape[0]}], one for each row of weight")
    check_like(x, [("weight", weight), ("bias", bias)])
    check_criterion(criterion)


def check_rule_tensors(
    criterion: str, temperature: Tensor | None, threshold: Tensor | None, device: torch.device
) -> None:
    """Check temperature and threshold given as tensors as ``check_head_arguments`` does, on the CPU their values, too.

    A value on an accelerator is not read, for that would make the host wait; the kernel lets no sample exit under a
    temperature that is not finite and greater than 0.
    """
    for name, tensor in (("temperature", temperature), ("threshold", threshold)):
        if tensor is None:
            continue
        if tensor.numel() != 1:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, wants one element")
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name}: got {tensor.dtype}, wants torch.float32")
        if tensor.device != device:
            raise ValueError(f"{name}: got device {tensor.device}, wants {device}, the device of x")
    if temperature is not None and temperature.device.type == "cpu":
        check_temperature(float(temperature))
    if threshold is not None and threshold.device.type == "cpu":
        check_threshold(criterion, float(threshold))
