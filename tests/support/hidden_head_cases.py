"""Networks whose heads have hidden layers, and what of such a head may change between two calls."""

from collections.abc import Callable

import torch
from auxhead.kernels import HeadOutput, decide
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from support.example_models import SmallNet
from support.head_sequentials import layer_norm
from torch import Tensor, nn


def _in_place(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.neg_()


#: Each changes the answers of a head with a ReLU, a norm of 6 features and 9 hidden ones under GELU.
HIDDEN_CHANGES: dict[str, Callable[[FusedAuxHead], object]] = {
    "hidden weight in place": lambda head: _in_place(head.hidden.linear.weight),
    "hidden bias in place": lambda head: _in_place(head.hidden.linear.bias),
    "norm in place": lambda head: _in_place(head.hidden.norm.weight),
    "another hidden weight": lambda head: setattr(head.hidden.linear, "weight", nn.Linear(6, 9).weight),
    "another bias of the norm": lambda head: setattr(head.hidden.norm, "bias", nn.Parameter(-head.hidden.norm.bias)),
    "no hidden bias": lambda head: setattr(head.hidden.linear, "bias", None),
    "data of the hidden weight": lambda head: setattr(head.hidden.linear.weight, "data", torch.randn(9, 6)),
    "another hidden layer": lambda head: setattr(head.hidden, "linear", nn.Linear(6, 9)),
    "no norm": lambda head: setattr(head.hidden, "norm", None),
    "eps": lambda head: setattr(head.hidden.norm, "eps", 0.5),
    "activation": lambda head: setattr(head.hidden, "activation", "hardswish"),
    "no ReLU before the pool": lambda head: setattr(head.hidden, "rectifies", False),
    "other hidden layers": lambda head: setattr(head, "hidden", FusedAuxHead(6, 5, hidden_features=9).hidden),
    "last weight": lambda head: _in_place(head.linear.weight),
    "half": lambda head: head.half(),
}  # fmt: skip


def hidden_head(width: int, activation: nn.Module, hidden: int) -> nn.Sequential:
    """A head with a ReLU, a norm and a hidden layer, sure now and then."""
    last = nn.Linear(hidden, 5)
    with torch.no_grad():
        last.weight.mul_(12.0)
    shape = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*shape, layer_norm(width), nn.Linear(width, hidden), activation, nn.Dropout(0.1), last)


def hidden_heads() -> dict[str, nn.Module]:
    """Heads of ``SmallNet``: one with all kinds of layers, one with a hidden layer alone, one with a norm alone."""
    some, norm = nn.Sequential(*hidden_head(12, nn.ReLU(), 33)), hidden_head(16, nn.GELU(), 9)
    del some[3], some[0]
    last = nn.Linear(16, 5)
    with torch.no_grad():
        last.weight.mul_(4.0)
    return {"block0": hidden_head(8, nn.GELU(), 17), "block1": some, "block2": nn.Sequential(*norm[1:4], last)}


def with_hidden_heads(x: Tensor) -> tuple[EarlyExitNetwork, dict[str, nn.Module]]:
    """Return a network every exit of which answers for some of a batch, and the heads as they were written."""
    written = hidden_heads()
    net = EarlyExitNetwork(SmallNet(), written).eval().to(x.device, x.dtype)
    net.check_taps(x)
    waiting = torch.ones(len(x), dtype=torch.bool, device=x.device)
    for head, output in zip(net.fused_heads, naive_answers(net, written, x), strict=False):
        ordered = output.confidence[waiting].sort().values
        head.rule.threshold = ordered[len(ordered) * 2 // 3 :][:2].mean().item()  # between two samples
        waiting &= output.confidence <= head.rule.threshold
    return net, written


@torch.no_grad()
def naive_answers(net: EarlyExitNetwork, written: dict[str, nn.Module], x: Tensor) -> list[HeadOutput]:
    """What every exit says of a batch, by the heads as they were written, which share the parameters."""
    said = []
    for tap, head in zip(net.taps, net.fused_heads, strict=True):
        x = net.backbone.get_submodule(tap)(x)
        rule = head.rule
        said.append(decide(written[tap].eval()(x), rule.temperature, rule.threshold, rule.criterion))
    return [*said, decide(net.backbone.fc(x.mean((2, 3))), 1.0, 1.0)]
