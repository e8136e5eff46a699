"""``lazy_after_errors``: a linear layer that takes its width from its first input, and gives it back if that fails."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def lazy_after_errors(linear: nn.Module) -> Iterator[None]:
    """Make an ``nn.LazyLinear`` that has not become an ``nn.Linear`` inside one without parameters again."""
    try:
        yield
    except BaseException:
        if isinstance(linear, nn.LazyLinear):
            # PyTorch makes one parameter after the other, and could not go on where there was memory for some.
            for parameter in linear.parameters():
                if not isinstance(parameter, nn.UninitializedParameter):
                    parameter.data = parameter.data.new_empty(0)
                    parameter.__class__ = nn.UninitializedParameter  # type: ignore[assignment]  # as PyTorch does
        raise
