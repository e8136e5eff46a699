"""``ReadTensors``: the tensors of heads that something reads by their addresses, and whether they are still those."""

from collections.abc import Iterable, Mapping
from operator import attrgetter, is_not

from torch import Tensor, nn

_form = attrgetter("shape", "dtype")


class ReadTensors:
    """Parameters and rules of heads, as they were when something was made that knows where they lie."""

    def __init__(self, heads: Iterable[nn.Module]) -> None:
        """Remember the heads' layers, rules and tensors, and where and how the tensors lie.

        Raises:
            KeyError: a head's layer has no parameters of its own: it is parametrized or pruned, or part of a replica.
        """
        # Looked up without nn.Module's attribute access, which would cost each call some microseconds a head.
        holders: list[tuple[Mapping[str, object], str]] = []
        for head in heads:
            modules = head._modules
            linear, rule = modules["linear"], modules["rule"]
            assert linear is not None and rule is not None
            holders += [
                (modules, "linear"), (modules, "rule"), (linear._parameters, "weight"), (linear._parameters, "bias"),
                (rule._buffers, "temperature_tensor"), (rule._buffers, "threshold_tensor"),
            ]  # fmt: skip
        self._holders, self._names = zip(*holders, strict=True)
        self._objects = [holder[name] for holder, name in holders]
        self._tensors = [one for one in self._objects if isinstance(one, Tensor)]
        self.parameters = [one for one in self._tensors if isinstance(one, nn.Parameter)]
        """Weights and biases."""
        self.addresses = [*map(Tensor.data_ptr, self._tensors)]
        """Where the tensors lay, of each head weight, bias, temperature and threshold, those that there are."""
        self._forms = [*map(_form, self._tensors)]
        self._strides = [*map(Tensor.stride, self._tensors)]

    def are_plain(self) -> bool:
        """Return whether the memory of all is as it seems: none is of a subclass, lazily negated or without any."""
        return all(
            type(one) in (Tensor, nn.Parameter) and not one.is_neg() and not one._is_zerotensor()
            for one in self._tensors
        )

    def are_unchanged(self) -> bool:
        """Return whether the heads still have the same layers and tensors, in the same memory."""
        tensors = self._tensors
        return not (
            any(map(is_not, map(dict.get, self._holders, self._names), self._objects))
            or [*map(Tensor.data_ptr, tensors)] != self.addresses
            or [*map(_form, tensors)] != self._forms
            or [*map(Tensor.stride, tensors)] != self._strides
            or any(map(Tensor.is_neg, tensors))  # a change of what the memory means; none was so when plans were made
        )
