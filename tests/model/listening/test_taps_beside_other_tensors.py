"""Tensors without sizes or memory of their own (sparse, opaque, nested, wrapped): none that kernels can read.

Other layers than those that are tapped may return them.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

pytestmark = [
    pytest.mark.usefixtures("without_interpreter"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]


class Doing(nn.Module):
    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x)


class Sampled(nn.Module):
    """An encoder that leaves out what is padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, None].expand(-1, 3, -1)
        mask = torch.zeros(tokens.shape[:2], dtype=torch.bool)
        mask[:, -1] = True
        return self.encoder(tokens, src_key_padding_mask=mask).sum(1)


def sparse() -> list[nn.Module]:
    return [Doing(torch.Tensor.to_sparse), Doing(lambda x: x.mul_(2.0)), Doing(lambda x: x.to_dense().relu_())]


def opaque() -> list[nn.Module]:
    return [Doing(torch.Tensor.to_mkldnn), Doing(torch.relu_), Doing(lambda x: x.to_dense().mul_(2.0))]


def nested() -> list[nn.Module]:
    return [Sampled(), Doing(lambda x: x.relu_())]


def wrapped() -> list[nn.Module]:
    """As a DTensor is."""
    return [Doing(lambda x: TwoTensor(x, x.clone())), Doing(lambda x: x * 2), Doing(lambda x: x.a)]


@pytest.mark.parametrize("layers", [sparse, opaque, nested, wrapped])
def test_they_are_none_of_a_tap_s_business(layers: Callable[[], list[nn.Module]]) -> None:
    backbone, x = nn.Sequential(nn.Linear(8, 8), *layers(), nn.Linear(8, 5)).eval(), torch.randn(3, 8)
    net = EarlyExitNetwork(backbone, {"0": FusedAuxHead(8, 5, rule=0.25)}).eval()
    answer = net(x)
    with torch.no_grad():
        first, last = (torch.softmax(one, 1) for one in (net.heads[0].logits(backbone[0](x)), backbone(x)))
    torch.testing.assert_close(answer.probs, torch.where((first.amax(1) > 0.25)[:, None], first, last))


@pytest.mark.parametrize("layers", [sparse, opaque, nested, wrapped])
def test_they_are_refused_as_taps(layers: Callable[[], list[nn.Module]]) -> None:
    backbone = nn.Sequential(nn.Linear(8, 8), *layers(), nn.Linear(8, 5)).eval()
    tap = "1" if layers is not nested else "1.encoder.layers.0"
    with pytest.raises(ValueError, match=rf"heads: layer '{tap}' returns a .*(t|T)ensor, which a head cannot read"):
        EarlyExitNetwork(backbone, {tap: FusedAuxHead(None, 5)}, example_input=torch.randn(3, 8))


@pytest.mark.parametrize("last", [torch.Tensor.to_sparse, lambda x: TwoTensor(x, x.clone())], ids=["sparse", "wrapped"])
def test_they_are_refused_as_logits(last: Callable[[Tensor], Tensor]) -> None:
    backbone = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5), Doing(last)).eval()
    with pytest.raises(ValueError, match="backbone: returned a .*ensor, wants logits"):
        EarlyExitNetwork(backbone, {"0": FusedAuxHead(8, 5)}, example_input=torch.randn(3, 8))


def test_graphs_refuse_parameters_whose_memory_is_not_what_they_are() -> None:
    """They read it as it is: numbers of the other sign, or from address 0."""
    head = FusedAuxHead(8, 5)
    assert head.as_exit_head().weight is head.linear.weight
    negated = torch.randn(5, 8, dtype=torch.complex64).conj().imag
    wrapped = TwoTensor(torch.randn(5, 8), torch.randn(5, 8))
    for name, value in (("weight", negated), ("weight", wrapped), ("bias", negated[:, 0])):
        other = copy.deepcopy(head)
        setattr(other.linear, name, nn.Parameter(value))
        with pytest.raises(ValueError, match=rf"^linear.{name}: .*, wants a plain tensor"):
            other.as_exit_head()
    head.linear.weight = nn.Parameter(negated)
    x = torch.randn(3, 8)
    torch.testing.assert_close(head(x).probs, torch.softmax(x @ negated.T + head.linear.bias, 1))
