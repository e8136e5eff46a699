"""``SilencedModel``: a model with exits of its own as a backbone, in which the last exit alone computes anything."""

from typing import Any, NamedTuple

from torch import Tensor, nn


class FoundExit(NamedTuple):
    """An exit that a model has, and how it became one of an :class:`EarlyExitNetwork`."""

    place: int | str
    """Index, key or attribute of its logits in what the model returns."""
    head: str
    """Name in the model of the module that computes them; "" if they are the output of no module."""
    tap: str
    """The tap of its fused head; "" for the last exit, which stays the backbone's own classifier."""
    pool: str
    """Pool of its fused head, with its windows; "" for the last exit."""
    classes: int
    """K."""
    softmax: bool
    """The model returns softmax(logits) there."""
    in_line: bool
    """Layers of its own come before its last linear layer, and run as a part of the backbone."""


class SilencedModel(nn.Module):
    """x -> logits [N, K] of a model's last exit; heads before it have been replaced by :class:`SilentHead`."""

    def __init__(self, model: nn.Module, exits: tuple[FoundExit, ...], *, by_attribute: bool, softmax: bool) -> None:
        """Hold a copy of the model, which shares its parameters.

        Args:
            model: the copy, silenced already.
            exits: in the order in which they run; the last one's place is that of the logits.
            by_attribute: the model returns an object of which exits are attributes.
            softmax: the copy returns softmax(logits) at the last place.
        """
        super().__init__()
        self.model = model
        self.exits = exits
        self._by_attribute = by_attribute
        self._softmax = softmax

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the last exit; of probabilities the logarithm, which softmax turns back."""
        last = self.pick(self.model(x), self.exits[-1])
        return last.log() if self._softmax else last

    def pick(self, answers: Any, one: FoundExit) -> Tensor:
        """Return what the model says at an exit, of all that it returned."""
        picked: Tensor = getattr(answers, str(one.place)) if self._by_attribute else answers[one.place]
        return picked


class SilentHead(nn.Module):
    """Stands where a head was: returns memory [N, K] that nobody wrote and nobody reads, and launches nothing."""

    def __init__(self, classes: int, *, tapped: bool = False) -> None:
        """Replace a module that takes one tensor of N samples; if it is ``tapped``, a head listens at ``input``."""
        super().__init__()
        self.classes = classes
        self.input = nn.Identity() if tapped else None

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape that the head's logits had."""
        if self.input is not None:
            self.input(x)
        return x.new_empty(x.shape[0], self.classes)
