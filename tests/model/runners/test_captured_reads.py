"""Memory that a capture reads lives as long as what has noted it, and none that it makes."""

import pytest
import torch
from auxhead.model.runners.captured_heads import CapturedReads, check_unmoved
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _disable_current_modes


def values(*sizes: int) -> Tensor:
    """Memory of no host, which would be kept in any case."""
    return torch.ones(*sizes, device="meta")


def watched(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def test_what_is_read_lives_and_what_is_made_goes() -> None:
    mask, x = values(3), values(3)
    kept, reads = watched(mask), CapturedReads([])
    with reads:
        made = x * mask
        gone = watched(made)
        made = made + 1
    del mask, made
    assert not kept.expired() and gone.expired()
    del reads
    assert kept.expired()


def test_memory_that_lies_where_something_made_was_is_read_all_the_same() -> None:
    """A storage may get the address of another one that has gone."""
    reads = CapturedReads([])
    with reads:
        made = values(3) + 1
        address = made.untyped_storage()._cdata
        del made
        with _disable_current_modes():
            others = [values(3) for _ in range(64)]
        same = [other for other in others if other.untyped_storage()._cdata == address]
        kept = [watched(other) for other in others]
        for other in others:
            other + 1
    del others, same
    if "other" in locals():
        del other
    assert not any(one.expired() for one in kept)


@pytest.mark.parametrize("called", [False, True])
def test_tensors_inside_a_tensor_of_another_class_live(called: bool) -> None:
    parts = values(3), values(3)
    layer = nn.Identity()
    layer.scale = TwoTensor(*parts)
    kept, reads = [watched(part) for part in parts], CapturedReads([] if called else [layer])
    with reads:
        if called:
            made = layer.scale * 2
            gone = [watched(part) for part in (made.a, made.b)]
            made = made * 2
            del made
            assert all(one.expired() for one in gone)
    del layer, parts
    assert not any(one.expired() for one in kept)
    del reads


def test_memory_that_a_layer_gives_back_by_resizing_is_noticed() -> None:
    layer = nn.Linear(3, 3)
    layer.positions = torch.arange(4)
    x, unread = torch.ones(4), torch.arange(2)
    reads = CapturedReads([layer])
    with reads:
        x = x + layer.positions
    addresses = reads.resizable(x)
    torch.arange(2, out=layer.positions)
    torch.arange(1 << 16, out=unread)
    check_unmoved(addresses)
    torch.arange(1 << 16, out=layer.positions)
    with pytest.raises(RuntimeError, match="resized in place since the capture"):
        check_unmoved(addresses)


def test_only_what_layers_may_resize_is_looked_at() -> None:
    layer, x = nn.BatchNorm1d(3).eval(), torch.ones(2, 3)
    reads = CapturedReads([nn.Sequential(layer)])
    with reads:
        layer(x)
    assert not reads.resizable(x)
