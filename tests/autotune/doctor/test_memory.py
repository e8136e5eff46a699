"""Whether two views of one storage share an element, against the elements themselves."""

import itertools

import pytest
import torch
from auxhead.autotune.doctor.watching.accesses import memory_at
from hypothesis import given, settings
from hypothesis import strategies as st


def share_an_element(one, other):
    """Number the bytes, and look."""

    def places(tensor):
        begin, item = tensor.storage_offset(), tensor.element_size()
        indices = itertools.product(*(range(size) for size in tensor.shape))
        starts = (begin + sum(i * s for i, s in zip(index, tensor.stride(), strict=True)) for index in indices)
        return {start * item + byte for start in starts for byte in range(item)}

    return bool(places(one) & places(other))


BUFFER = torch.zeros(6, 8, 10)

PAIRS = {
    "halves": (BUFFER[:3], BUFFER[3:], False),
    "overlapping rows": (BUFFER[:4], BUFFER[3:], True),
    "all and one row": (BUFFER, BUFFER[5], True),
    "columns": (BUFFER[..., :5], BUFFER[..., 5:], False),
    "overlapping columns": (BUFFER[..., :6], BUFFER[..., 5:], True),
    "even and odd columns": (BUFFER[..., ::2], BUFFER[..., 1::2], False),
    "quarters": (BUFFER[:3, :, :5], BUFFER[3:, :, 5:], False),
    "a column and a row": (BUFFER[..., 9], BUFFER[0, 0], True),
    "a column and a row without it": (BUFFER[..., 9], BUFFER[0, 0, :9], False),
    "a transposed part": (BUFFER[0].t(), BUFFER[0, 7, 9], True),
    "other types": (BUFFER.view(torch.float16)[..., :10], BUFFER[..., 5:], False),
    "other types that overlap": (BUFFER.view(torch.float16)[..., :11], BUFFER[..., 5:], True),
    "expanded": (BUFFER[0, 0, :1].expand(4), BUFFER[0, 0, 1:], False),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_views_of_one_storage(pair):
    one, other, wanted = PAIRS[pair]
    assert share_an_element(one, other) is wanted
    a, b = memory_at(one), memory_at(other)
    assert a.block == b.block
    assert a.overlaps(b) is wanted and b.overlaps(a) is wanted


def test_large_views_are_quick():
    x = torch.empty(1 << 24)
    halves, strided = (x[: 1 << 23], x[1 << 23 :]), (x[::2], x[1::2])
    for (one, other), wanted in ((halves, False), (strided, False), ((x, x[12345:]), True), ((x[::3], x[1::2]), True)):
        assert memory_at(one).overlaps(memory_at(other)) is wanted


@st.composite
def views(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    strides = [draw(st.integers(0, 12)) for _ in sizes]
    return BUFFER.as_strided(sizes, strides, draw(st.integers(0, 60)))


@given(views(), views())
@settings(max_examples=300, deadline=None)
def test_any_two_views(one, other):
    assert memory_at(one).overlaps(memory_at(other)) is share_an_element(one, other)


def test_what_has_no_memory():
    assert memory_at(torch.empty(0)) is None
    assert memory_at(torch.eye(3).to_sparse()) is None
