"""Data movement: values that are others' elements in another place, told by replaying it on labels for numbers."""

from math import prod

from torch import Tensor, arange, equal

from ..listening.recording import Operation, Value

#: Operators that move elements and compute nothing.
_MOVES = frozenset(
    "view _unsafe_view reshape _reshape_alias flatten squeeze unsqueeze alias detach clone contiguous lift_fresh "
    "expand permute transpose t movedim cat stack unbind select slice split split_with_sizes unsafe_split chunk".split()
)
_SHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias")
#: Operators to look back over.
_MOST = 64


def is_move(operation: Operation, *, backwards: bool = True) -> bool:
    """Return whether an operation moves elements and computes nothing; nor in what it hands back, as detach does."""
    is_known = operation.name in _MOVES and not isinstance(operation.function, str)
    if not is_known or any(value.dtype != operation.makes[0].dtype for value in operation.reads):
        return False
    return not (backwards and (operation.cuts or operation.name == "detach"))


def same_elements(value: Value, *, backwards: bool = True) -> list[Value]:
    """Return the values that have just the elements of one in the same order, from that one to the earliest."""
    found = [value]
    while (operation := found[-1].made_by) is not None and len(operation.reads) == 1:
        if not is_move(operation, backwards=backwards):
            break
        (source,) = operation.reads
        if prod(source.shape) != prod(value.shape):
            break
        moved = _moved(found[-1], [operation])
        if moved is None or not equal(moved.flatten(), arange(moved.numel())):
            break
        found.append(source)
    return found


def parts_along(value: Value, dim: int) -> list[Value] | None:
    """Return the values that were stacked to make one, along a dimension; None if it was not made so."""
    operations: list[Operation] = []
    _collect(value, operations)
    labels = _moved(value, operations)
    if labels is None:
        return None
    inner = {made for operation in operations for made in operation.makes}
    sources: dict[int, Value] = {}
    start = 0
    for read in dict.fromkeys(read for operation in operations for read in operation.reads if read not in inner):
        sources[start] = read
        start += prod(read.shape)
    parts = []
    for part in labels.unbind(dim):
        source = sources.get(int(part.flatten()[0]))
        if source is None or not equal(part.flatten(), arange(part.numel()) + part.flatten()[0]):
            return None
        if prod(source.shape) != part.numel():
            return None
        parts.append(source)
    return parts


def _collect(value: Value, operations: list[Operation]) -> None:
    made_by = value.made_by
    if made_by is None or made_by in operations or not is_move(made_by, backwards=False) or len(operations) >= _MOST:
        return
    if made_by.name == "detach":
        return
    for read in made_by.reads:
        if read not in made_by.cuts:
            _collect(read, operations)
    operations.append(made_by)


def _moved(value: Value, operations: list[Operation]) -> Tensor | None:
    """Return where the elements of a value come from, numbered through what the operations read from outside."""
    labels: dict[Value, Tensor] = {}
    start = 0
    for operation in operations:
        for read in operation.reads:
            if read not in labels:
                count = prod(read.shape)
                labels[read] = arange(start, start + count).view(read.shape)
                start += count
        if operation.name in _SHAPES:  # the labels may lie in other strides than the numbers did
            made = [labels[operation.reads[0]].reshape(operation.args[1])]
        else:
            made = operation.run(labels)
        labels.update(zip(operation.makes, made, strict=False))
    return labels.get(value)
