"""``AllExits`` and ``HeadsOnFeatures``: the two kinds of module that are trained; and ``as_before`` for them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from ..early_exit_network import EarlyExitNetwork
from ..module_head import AuxHead


@contextmanager
def as_before(module: nn.Module) -> Iterator[None]:
    """At the end, put all parts of a module into the modes, and give parameters the gradients, that they had."""
    modes = [(part, part.training) for part in module.modules()]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient


class AllExits(nn.Module):
    """The logits of all exits of a network as one forward, which DistributedDataParallel can wrap."""

    def __init__(self, network: EarlyExitNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the logits of every head and, last, of the classifier."""
        return self.network.logits(x)


class HeadsOnFeatures(nn.Module):
    """A network's heads, on features that its taps gave before; they share the parameters."""

    def __init__(self, heads: Sequence[AuxHead]) -> None:
        super().__init__()
        self._in_order = tuple(heads)
        self.heads = nn.ModuleList(heads)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Return the logits of every head and the classifier's.

        Args:
            features: of each tap what its head's ``features`` are, and last the classifier's logits [N, K], which are
                handed on.
        """
        *read, final = features
        logits = [head.logits_of_features(each) for head, each in zip(self._in_order, read, strict=True)]
        return [*logits, final]
