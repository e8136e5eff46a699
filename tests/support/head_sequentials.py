"""Classifiers as people write them, of every kind that a fused head can replace."""

from collections import OrderedDict

from torch import nn

MAP = (3, 6, 5, 7)  # N, C, H, W
avg, maximum, flat, drop, same = nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Flatten, nn.Dropout, nn.Identity


def seq(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(*parts)


def named(**parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


OF_MAPS = {
    "avg": lambda: seq(avg(1), flat(), nn.Linear(6, 5)),
    "avg-2x3": lambda: seq(avg((2, 3)), flat(), nn.Linear(36, 5)),
    "avg-larger-than-map": lambda: seq(avg(8), flat(), nn.Linear(384, 5)),
    "max": lambda: seq(maximum(1), flat(), nn.Linear(6, 5)),
    "max-3x4": lambda: seq(maximum((3, 4)), flat(), nn.Linear(72, 5)),
    "flatten": lambda: seq(flat(), nn.Linear(210, 5)),
    "no-bias": lambda: seq(avg(1), flat(), nn.Linear(6, 5, bias=False)),
    "dropout-before-linear": lambda: seq(avg(2), flat(), drop(0.3), nn.Linear(24, 5)),
    "dropout-before-flatten": lambda: seq(avg(2), drop(0.3), flat(), nn.Linear(24, 5)),
    "dropout-twice": lambda: seq(avg(1), drop(0.3), flat(), drop(0.5), nn.Linear(6, 5)),
    "dropout-then-flatten": lambda: seq(drop(0.2), flat(), nn.Linear(210, 5)),
    "softmax": lambda: seq(avg(1), flat(), nn.Linear(6, 5), nn.Softmax(dim=1)),
    "softmax-last-dim": lambda: seq(maximum(1), flat(), nn.Linear(6, 5), nn.Softmax(-1), same()),
    "identity-everywhere": lambda: seq(same(), avg(1), same(), flat(), same(), nn.Linear(6, 5), same()),
    "nested": lambda: seq(seq(avg(2), flat()), seq(drop(0.1), nn.Linear(24, 5))),
    "nested-deeply": lambda: seq(seq(seq(seq(avg(1))), same()), flat(), seq(seq(nn.Linear(6, 5)), nn.Softmax(1))),
    "named-fc": lambda: named(pool=maximum(2), flatten=flat(), dropout=drop(0.2), fc=nn.Linear(24, 5)),
    "named-as-our-attributes": lambda: named(rule=avg(1), dropout=flat(), pool=drop(0.2), pool_size=nn.Linear(6, 5)),
    "linear-named-rule": lambda: named(linear=avg(1), logits=flat(), rule=nn.Linear(6, 5)),
    "linear-in-linear": lambda: named(linear=named(linear=seq(avg(1), flat(), nn.Linear(6, 5)))),
}
OF_VECTORS = {
    "linear": lambda: seq(nn.Linear(6, 5)),
    "dropout-linear": lambda: seq(drop(0.2), nn.Linear(6, 5)),
    "flatten-linear": lambda: seq(flat(), nn.Linear(6, 5)),
    "linear-softmax": lambda: named(fc=nn.Linear(6, 5), softmax=nn.Softmax(dim=-1)),
}
ALL = {**OF_MAPS, **OF_VECTORS}

#: With layers before the last one that run in its launch.
HIDDEN = {
    "relu": lambda: seq(avg(1), flat(), nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5)),
    "gelu": lambda: seq(avg(1), flat(), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5)),
    "gelu-tanh": lambda: seq(maximum(1), flat(), nn.Linear(6, 9), nn.GELU(approximate="tanh"), nn.Linear(9, 5)),
    "hardswish": lambda: seq(avg(1), flat(), nn.Linear(6, 9), nn.Hardswish(inplace=True), nn.Linear(9, 5)),
    "no-biases": lambda: seq(avg(1), flat(), nn.Linear(6, 9, bias=False), nn.ReLU(), nn.Linear(9, 5, bias=False)),
    "grid": lambda: seq(avg((2, 3)), flat(), nn.Linear(36, 33), nn.ReLU(), nn.Linear(33, 5), nn.Softmax(1)),
    "flatten": lambda: seq(flat(), nn.Linear(210, 17), nn.ReLU(), nn.Linear(17, 5)),
    "dropouts": lambda: seq(avg(1), flat(), drop(0.2), nn.Linear(6, 9), nn.ReLU(), drop(0.4), nn.Linear(9, 5)),
    "norm": lambda: seq(avg(1), flat(), layer_norm(6), nn.Linear(6, 5)),
    "bare-norm": lambda: seq(avg(1), flat(), nn.LayerNorm(6, eps=1e-3, elementwise_affine=False), nn.Linear(6, 5)),
    "norm-without-bias": lambda: seq(avg(1), flat(), nn.LayerNorm(6, bias=False), nn.Linear(6, 5)),
    "norm-and-hidden": lambda: seq(
        avg(1), flat(), layer_norm(6), drop(0.1), nn.Linear(6, 9), nn.GELU(), drop(0.2), nn.Linear(9, 5)
    ),
    "relu-first": lambda: seq(nn.ReLU(), avg(1), flat(), nn.Linear(6, 5)),
    "relu-before-max": lambda: seq(nn.ReLU(), maximum(2), flat(), nn.Linear(24, 9), nn.ReLU(), nn.Linear(9, 5)),
    "all": lambda: named(
        act=nn.ReLU(), pool=avg(1), flat=flat(), norm=layer_norm(6), fc1=nn.Linear(6, 9), mid=nn.GELU(),
        fc2=nn.Linear(9, 5), softmax=nn.Softmax(-1),
    ),
    "names-of-ours-for-others": lambda: named(
        linear=avg(1), hidden=flat(), norm=nn.Linear(6, 9), rule=nn.ReLU(), pool=nn.Linear(9, 5)
    ),
    "nested": lambda: seq(seq(avg(1), flat()), seq(same(), seq(nn.Linear(6, 9), nn.ReLU())), seq(nn.Linear(9, 5))),
}  # fmt: skip


def layer_norm(features: int) -> nn.LayerNorm:
    """A norm whose parameters do something."""
    norm = nn.LayerNorm(features)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return norm
