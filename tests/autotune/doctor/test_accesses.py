"""Accesses that nothing orders, memory that is freed in use, and whether two views of one storage share an element."""

import itertools

import pytest
import torch
from auxhead.autotune.doctor.watching.accesses import Accesses, Memory, Operator, memory_at
from auxhead.autotune.doctor.watching.stream_uses import StreamUses
from hypothesis import given, settings
from hypothesis import strategies as st

STREAMS = {"main": 0, "side": 0x10, "third": 0x20}
EVENT = 0x99


def memory(name):
    """Of ``x`` or ``y``, or of some of its eight elements: ``x[2:6]``."""
    tensor, _, part = name.partition("[")
    block = {"x": 0x1000, "y": 0x2000}[tensor]
    begin, end = map(int, part.rstrip("]").split(":")) if part else (0, 8)
    return Memory(block + 4 * begin, block, f"float32[{end - begin}]", 4, (end - begin,), (4,))


def races_of(program):
    """What is told of a program in words, whose steps are lines of a.py."""
    account = Accesses(StreamUses())
    for number, step in enumerate(program.split("; "), 1):
        line = f"a.py:{number}"
        match step.split():
            case [stream, "writes", name]:
                account.launched(STREAMS[stream], Operator("aten::fill_", line), [], [memory(name)])
            case [stream, "reads", name]:
                account.launched(STREAMS[stream], Operator("aten::sum", line), [memory(name)], [])
            case [stream, "copies", name, "to", "host"]:  # which waits within the operator, before it is noted
                account.ordered("all_streams_wait_for_stream", STREAMS[stream])
                account.launched(STREAMS[stream], Operator("aten::copy_", line), [memory(name)], [], done=True)
            case [stream, "reserves", name]:
                account.reserved(STREAMS[stream], Operator("aten::empty", line), memory(name))
            case [stream, "allocates", name]:
                account.allocated(memory(name).block, STREAMS[stream])
            case ["free", name]:
                account.freed(memory(name).block, line)
            case ["record", name, "on", stream]:
                account.stream_recorded(memory(name).block, STREAMS[stream])
            case ["host", "awaits", "device"]:
                account.ordered("sync_all_streams")
            case ["host", "awaits", "event", "of", stream]:
                account.ordered("record_state", EVENT, STREAMS[stream])
                account.ordered("all_streams_wait_for_event", EVENT)
            case ["host", "awaits", stream]:
                account.ordered("all_streams_wait_for_stream", STREAMS[stream])
            case ["doctor", "awaits", "device"]:
                account.ordered("sync_all_streams", by_user=False)
            case ["copy", "joins", *streams]:
                account.joined([STREAMS[stream] for stream in streams])
            case [stream, "awaits", other]:
                account.ordered("create_event", EVENT)
                account.ordered("record_state", EVENT, STREAMS[other])
                account.ordered("stream_wait_for_event", STREAMS[stream], EVENT)
                account.ordered("delete_event", EVENT)
            case _:
                raise AssertionError(step)
    return account.races


#: Memory of the main stream that the side stream reads in order; and what then runs in its place.
USED = "main allocates x; main writes x; side awaits main; side reads x"
NEXT = "main allocates y; main writes y"


@pytest.mark.parametrize(
    "program, lines",
    [
        ("main writes x; side reads x", [(1, 2)]),
        ("side reads x; main writes x", [(1, 2)]),
        ("main writes x; side reads x; side reads x; main awaits side; main writes x", [(1, 2), (1, 3)]),
        ("main writes x; side writes x", [(1, 2)]),
        ("main writes y; main reserves x; side writes x", [(2, 3)]),
        ("side writes x; main reads x[4:8]", [(1, 2)]),
        ("side writes x[4:8]; main reads x", [(1, 2)]),
        ("side writes x[0:5]; main reads x[4:8]", [(1, 2)]),
        (f"{USED}; free x; {NEXT}", [(4, 5)]),
        (f"{USED.replace('x', 'x[2:4]')}; free x; {NEXT}", [(4, 5)]),
        (f"{USED}; record x on third; free x; {NEXT}", [(4, 6)]),
        (f"{USED}; free x; doctor awaits device; {NEXT}", [(4, 5)]),  # between requests: it is not the program's
    ],
)
def test_what_has_no_order_is_told_with_its_lines(program, lines):
    races = races_of(program)
    assert [race.lines for race in races] == [tuple(f"a.py:{line}" for line in pair) for pair in lines]
    assert [race.freed for race in races] == ["free" in program] * len(races)


@pytest.mark.parametrize(
    "program",
    [
        "main writes x; side awaits main; side reads x",
        "main writes x; host awaits main; side reads x",
        "main writes x; host awaits device; side reads x",
        "main writes x; host awaits event of main; side reads x",
        "main writes x; copy joins main side; side reads x",
        "side copies x to host; main writes x",
        "third reserves x; side writes x",  # before anything ran
        "main writes y; side awaits main; main reserves x; side writes x",
        "main writes x; side awaits main; side writes x[0:4]; main writes x[4:8]; main awaits side; main reads x",
        "side reads x[0:5]; main reads x[4:8]; main awaits side; main writes x[2:6]",
        "side allocates x; side writes x[2:4]; free x; main allocates x; main writes x[2:4]",
        f"{USED}; main awaits side; free x; {NEXT}",
        f"{USED}; record x on side; free x; {NEXT}",
        f"{USED}; free x; main awaits side; {NEXT}",  # as the next request's fork does
        f"{USED}; free x; host awaits side; {NEXT}",
        f"side reads x; free x; {NEXT}",  # it is from before
        "side allocates x; side writes x; free x; side allocates x; side writes x; free x",
    ],
)
def test_accesses_with_an_order_are_none(program):
    assert races_of(program) == ()


def test_a_race_in_words():
    (race,) = races_of("main writes x; side reads x[2:6]")
    assert race.tensor == "float32[8]"
    assert race.first == "writes: aten::fill_ on the default stream, a.py:1"
    assert race.second == "reads: aten::sum on stream 0x10, a.py:2"
    (race,) = races_of("main writes y; main reserves x; side writes x")
    assert race.first == "allocates: aten::empty on the default stream, a.py:2"
    (race,) = races_of(f"{USED}; free x; {NEXT}")
    assert race.second == "freed, of the default stream, a.py:5"


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


@st.composite
def views(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=0, max_size=3))
    strides = [draw(st.integers(0, 12)) for _ in sizes]
    canvas = draw(st.sampled_from([CANVAS, CANVAS.view(torch.float16)]))
    return canvas.as_strided(sizes, strides, draw(st.integers(0, 60)))


@given(views(), views())
@settings(max_examples=150, deadline=None)
def test_any_two_views(one, other):
    assert memory_at(one).overlaps(memory_at(other)) is share_an_element(one, other)


def test_large_views_are_quick():
    x = torch.empty(1 << 24)
    halves, strided = (x[: 1 << 23], x[1 << 23 :]), (x[::2], x[1::2])
    for (one, other), wanted in ((halves, False), (strided, False), ((x, x[12345:]), True), ((x[::3], x[1::2]), True)):
        assert memory_at(one).overlaps(memory_at(other)) is wanted


def test_what_has_no_memory():
    assert memory_at(torch.empty(0)) is None
    assert memory_at(torch.eye(3).to_sparse()) is None
