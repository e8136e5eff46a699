"""Accesses that nothing orders, memory that is freed in use, and whether two views of one storage share an element."""

import itertools

import pytest
import torch
from auxhead.autotune.doctor.watching.accesses import Accesses, Memory, Operator, memory_at
from auxhead.autotune.doctor.watching.stream_uses import StreamUses
from hypothesis import given, settings
from hypothesis import strategies as st

MAIN, SIDE, EVENT = 0, 0x10, 0x99
BUFFER = Memory(0x1000, 0x1000, "float32[4]")
OTHER = Memory(0x2000, 0x2000, "float32[4]")


class Account(Accesses):
    """Accesses, by what a program does."""

    def __init__(self):
        super().__init__(StreamUses())

    def write(self, stream, memory=BUFFER, line="a.py:1", **more):
        self.launched(stream, Operator("aten::fill_", line), [], [memory], **more)

    def read(self, stream, memory=BUFFER, line="a.py:2", **more):
        self.launched(stream, Operator("aten::sum", line), [memory], [], **more)

    def reserve(self, stream, line="a.py:1"):
        self.reserved(stream, Operator("aten::empty", line), BUFFER)

    def wait(self, waiting, other):
        self.ordered("create_event", EVENT)
        self.ordered("record_state", EVENT, other)
        self.ordered("stream_wait_for_event", waiting, EVENT)
        self.ordered("delete_event", EVENT)

    def use_on_side(self, pointer=0x1000):
        """Memory of the main stream, which the side stream reads in order."""
        self.allocated(0x1000, MAIN)
        memory = Memory(pointer, 0x1000, "float32[4]")
        self.write(MAIN, memory)
        self.wait(SIDE, MAIN)
        self.read(SIDE, memory)

    def run_next(self):
        self.allocated(0x2000, MAIN)
        self.write(MAIN, OTHER)


def view(first, count, size=4):
    return Memory(0x1000 + size * first, 0x1000, f"float32[{count}]", size, ((size, count),))


def test_a_read_that_does_not_wait_for_the_write_is_a_race():
    account = Account()
    account.write(MAIN)
    account.read(SIDE)
    (race,) = account.races
    assert race.tensor == "float32[4]" and not race.freed
    assert race.first == "writes: aten::fill_ on the default stream, a.py:1"
    assert race.second == "reads: aten::sum on stream 0x10, a.py:2"
    assert race.lines == ("a.py:1", "a.py:2")


def test_a_write_that_does_not_wait_for_the_read_is_a_race():
    account = Account()
    account.read(SIDE)
    account.write(MAIN)
    assert [race.first[:5] for race in account.races] == ["reads"]


def test_each_pair_of_lines_is_told_once_and_a_line_that_races_with_itself_too():
    account = Account()
    for _ in range(3):
        account.write(MAIN)
        account.read(SIDE, line="a.py:2")
        account.read(SIDE, line="a.py:3")
        account.wait(MAIN, SIDE)
    account.write(MAIN, OTHER)
    account.write(SIDE, OTHER)
    assert [race.lines for race in account.races] == [("a.py:1", "a.py:2"), ("a.py:1", "a.py:3"), ("a.py:1",)]


def test_reserved_memory_is_free_after_what_ran_before():
    account = Account()
    account.write(MAIN, OTHER)
    account.reserve(MAIN)
    account.write(SIDE, line="a.py:2")
    (race,) = account.races
    assert race.first == "allocates: aten::empty on the default stream, a.py:1"
    assert race.lines == ("a.py:1", "a.py:2")


@pytest.mark.parametrize(
    ("one", "other"), [(view(0, 8), view(4, 4)), (view(4, 4), view(0, 8)), (view(0, 5), view(4, 4))]
)
def test_views_that_share_an_element_race(one, other):
    account = Account()
    account.write(SIDE, one)
    account.read(MAIN, other)
    (race,) = account.races
    assert race.tensor == one.words and race.lines == ("a.py:1", "a.py:2")
    assert race.second == "reads: aten::sum on the default stream, a.py:2"


@pytest.mark.parametrize("pointer", [0x1000, 0x1008], ids=["tensor", "slice"])
def test_memory_freed_in_use_is_told(pointer):
    account = Account()
    account.use_on_side(pointer)
    account.freed(0x1000, "a.py:3")
    account.run_next()
    (race,) = account.races
    assert race.freed and race.lines == ("a.py:2", "a.py:3")
    assert race.first == "reads: aten::sum on stream 0x10, a.py:2"
    assert race.second == "freed, of the default stream, a.py:3"


@pytest.mark.parametrize("between", ["record_stream of another stream", "a wait of the host that is not the user's"])
def test_what_does_not_help_memory_that_is_freed_in_use(between):
    """A wait between the watched requests is not the program's."""
    account = Account()
    account.use_on_side()
    if between.startswith("record_stream"):
        account.stream_recorded(0x1000, 0x20)
    account.freed(0x1000, "a.py:3")
    if between.startswith("a wait"):
        account.ordered("sync_all_streams", by_user=False)
    account.run_next()
    assert [race.freed for race in account.races] == [True]


def in_order(*order):
    """A write, what orders it, and a read on another stream."""

    def run(account):
        account.write(MAIN)
        for how, *arguments in order:
            getattr(account, how)(*arguments)
        account.read(SIDE)

    return run


def a_read_that_the_host_waited_for(account):
    account.ordered("all_streams_wait_for_stream", SIDE)  # within the operator, before it is noted
    account.read(SIDE, done=True)
    account.write(MAIN)


def reserved_before_anything_ran(account):
    account.reserve(0x20)
    account.write(SIDE)


def a_wait_before_the_memory_was_reserved(account):
    account.write(MAIN, OTHER)
    account.wait(SIDE, MAIN)
    account.reserve(MAIN)
    account.write(SIDE)


def views_that_share_nothing_though_all_of_it_was_used_before(account):
    account.write(MAIN, view(0, 8))
    account.wait(SIDE, MAIN)
    account.write(SIDE, view(0, 4))
    account.write(MAIN, view(4, 4))
    account.wait(MAIN, SIDE)
    account.read(MAIN, view(0, 8))


def views_that_are_only_read_or_used_in_order(account):
    account.read(SIDE, view(0, 5))
    account.read(MAIN, view(4, 4))
    account.wait(MAIN, SIDE)
    account.write(MAIN, view(2, 4))


def memory_used_again_that_has_forgotten_its_slices(account):
    account.allocated(0x1000, SIDE)
    account.write(SIDE, Memory(0x1008, 0x1000, "float32[2]"))
    account.freed(0x1000, None)
    account.allocated(0x1008, MAIN)
    account.write(MAIN, Memory(0x1008, 0x1008, "float32[2]"))


def held_until_the_join(account):
    account.use_on_side()
    account.wait(MAIN, SIDE)
    account.freed(0x1000, None)
    account.run_next()


def record_stream(account):
    account.use_on_side()
    account.stream_recorded(0x1000, SIDE)
    account.freed(0x1000, None)
    account.run_next()


def a_wait_before_the_next_allocation(account):
    """A side stream's output, used by the caller after the join and freed: the next request's fork waits for it."""
    account.use_on_side()
    account.freed(0x1000, None)
    account.wait(MAIN, SIDE)
    account.run_next()


def a_wait_of_the_program(account):
    account.use_on_side()
    account.freed(0x1000, "a.py:3")
    account.ordered("all_streams_wait_for_stream", SIDE)
    account.run_next()


def memory_from_before(account):
    account.read(SIDE)
    account.freed(0x1000, None)
    account.run_next()


def memory_used_again_on_its_own_stream(account):
    for _ in range(2):
        account.allocated(0x1000, SIDE)
        account.write(SIDE)
        account.freed(0x1000, None)


CORRECT = {
    "an event": in_order(("wait", SIDE, MAIN)),
    "a stream that is waited for": in_order(("ordered", "all_streams_wait_for_stream", MAIN)),
    "a device that is waited for": in_order(("ordered", "sync_all_streams")),
    "an event that is done": in_order(
        ("ordered", "record_state", EVENT, MAIN), ("ordered", "all_streams_wait_for_event", EVENT)
    ),
    "a copy that joins streams": in_order(("joined", [MAIN, SIDE])),
    **{
        run.__name__: run
        for run in (
            *(a_read_that_the_host_waited_for, reserved_before_anything_ran, a_wait_before_the_memory_was_reserved),
            *(views_that_share_nothing_though_all_of_it_was_used_before, views_that_are_only_read_or_used_in_order),
            *(memory_used_again_that_has_forgotten_its_slices, held_until_the_join, record_stream),
            *(a_wait_before_the_next_allocation, a_wait_of_the_program, memory_from_before),
            *(memory_used_again_on_its_own_stream,),
        )
    },
}


def test_accesses_with_an_order_are_none():
    for name, run in CORRECT.items():
        account = Account()
        run(account)
        assert account.races == (), name


# Views.


def share_an_element(one, other):
    """Number the bytes, and look."""

    def places(tensor):
        begin, item = tensor.storage_offset(), tensor.element_size()
        indices = itertools.product(*(range(size) for size in tensor.shape))
        starts = (begin + sum(i * s for i, s in zip(index, tensor.stride(), strict=True)) for index in indices)
        return {start * item + byte for start in starts for byte in range(item)}

    return bool(places(one) & places(other))


CANVAS = torch.zeros(6, 8, 10)

PAIRS = {
    "halves": (CANVAS[:3], CANVAS[3:], False),
    "overlapping rows": (CANVAS[:4], CANVAS[3:], True),
    "all and one row": (CANVAS, CANVAS[5], True),
    "columns": (CANVAS[..., :5], CANVAS[..., 5:], False),
    "overlapping columns": (CANVAS[..., :6], CANVAS[..., 5:], True),
    "even and odd columns": (CANVAS[..., ::2], CANVAS[..., 1::2], False),
    "quarters": (CANVAS[:3, :, :5], CANVAS[3:, :, 5:], False),
    "a column and a row": (CANVAS[..., 9], CANVAS[0, 0], True),
    "a column and a row without it": (CANVAS[..., 9], CANVAS[0, 0, :9], False),
    "a transposed part": (CANVAS[0].t(), CANVAS[0, 7, 9], True),
    "other types": (CANVAS.view(torch.float16)[..., :10], CANVAS[..., 5:], False),
    "other types that overlap": (CANVAS.view(torch.float16)[..., :11], CANVAS[..., 5:], True),
    "expanded": (CANVAS[0, 0, :1].expand(4), CANVAS[0, 0, 1:], False),
}


def test_views_of_one_storage():
    for pair, (one, other, wanted) in PAIRS.items():
        assert share_an_element(one, other) is wanted, pair
        a, b = memory_at(one), memory_at(other)
        assert a.block == b.block
        assert a.overlaps(b) is wanted and b.overlaps(a) is wanted, pair


def test_large_views_are_quick():
    x = torch.empty(1 << 24)
    halves, strided = (x[: 1 << 23], x[1 << 23 :]), (x[::2], x[1::2])
    for (one, other), wanted in ((halves, False), (strided, False), ((x, x[12345:]), True), ((x[::3], x[1::2]), True)):
        assert memory_at(one).overlaps(memory_at(other)) is wanted


@st.composite
def views(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    strides = [draw(st.integers(0, 12)) for _ in sizes]
    return CANVAS.as_strided(sizes, strides, draw(st.integers(0, 60)))


@given(views(), views())
@settings(max_examples=150, deadline=None)
def test_any_two_views(one, other):
    assert memory_at(one).overlaps(memory_at(other)) is share_an_element(one, other)


def test_what_has_no_memory():
    assert memory_at(torch.empty(0)) is None
    assert memory_at(torch.eye(3).to_sparse()) is None
