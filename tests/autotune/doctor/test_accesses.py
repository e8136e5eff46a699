"""Accesses that nothing orders, and memory that is freed in use, as the doctor's watcher accounts for them."""

import pytest
from auxhead.autotune.doctor.watching.accesses import Accesses, Operator
from auxhead.autotune.doctor.watching.memory import Memory
from auxhead.autotune.doctor.watching.stream_uses import StreamUses

MAIN, SIDE, EVENT = 0, 0x10, 0x99
BUFFER = Memory(0x1000, 0x1000, "float32[4]")
OTHER = Memory(0x2000, 0x2000, "float32[4]")


@pytest.fixture
def accesses():
    return Accesses(StreamUses())


def write(accesses, stream, memory=BUFFER, line="a.py:1", **more):
    accesses.launched(stream, Operator("aten::fill_", line), [], [memory], **more)


def read(accesses, stream, memory=BUFFER, line="a.py:2", **more):
    accesses.launched(stream, Operator("aten::sum", line), [memory], [], **more)


def wait(accesses, waiting, other):
    accesses.event_created(EVENT)
    accesses.event_recorded(EVENT, other)
    accesses.event_waited(EVENT, waiting)
    accesses.event_deleted(EVENT)


# Accesses without order.


def test_a_read_that_does_not_wait_for_the_write_is_a_race(accesses):
    write(accesses, MAIN)
    read(accesses, SIDE)
    (race,) = accesses.races
    assert race.tensor == "float32[4]" and not race.freed
    assert race.first == "writes: aten::fill_ on the default stream, a.py:1"
    assert race.second == "reads: aten::sum on stream 0x10, a.py:2"
    assert race.lines == ("a.py:1", "a.py:2")


def test_a_write_that_does_not_wait_for_the_read_is_a_race(accesses):
    read(accesses, SIDE)
    write(accesses, MAIN)
    assert [race.first[:5] for race in accesses.races] == ["reads"]


@pytest.mark.parametrize("order", ["event", "stream", "device", "done event"])
def test_accesses_with_an_order_are_none(accesses, order):
    write(accesses, MAIN)
    if order == "event":
        wait(accesses, SIDE, MAIN)
    elif order == "stream":
        accesses.stream_synchronized(MAIN)
    elif order == "device":
        accesses.device_synchronized()
    else:
        accesses.event_recorded(EVENT, MAIN)
        accesses.event_synchronized(EVENT)
    read(accesses, SIDE)
    assert accesses.races == ()


def test_each_pair_of_lines_is_told_once(accesses):
    for _ in range(3):
        write(accesses, MAIN, line="a.py:1")
        read(accesses, SIDE, line="a.py:2")
        read(accesses, SIDE, line="a.py:3")
        wait(accesses, MAIN, SIDE)
    assert [race.lines for race in accesses.races] == [("a.py:1", "a.py:2"), ("a.py:1", "a.py:3")]


def test_one_line_that_races_with_itself_is_given_once(accesses):
    write(accesses, MAIN, line="a.py:1")
    write(accesses, SIDE, line="a.py:1")
    assert [race.lines for race in accesses.races] == [("a.py:1",)]


def test_a_read_that_the_host_waited_for_is_over(accesses):
    accesses.stream_synchronized(SIDE)  # within the operator, before it is noted
    read(accesses, SIDE, done=True)
    write(accesses, MAIN)
    assert accesses.races == ()


def test_streams_that_a_copy_joins_have_an_order(accesses):
    write(accesses, MAIN)
    accesses.joined([MAIN, SIDE])
    read(accesses, SIDE)
    assert accesses.races == ()


def test_reserved_memory_is_free_after_what_ran_before(accesses):
    write(accesses, MAIN, OTHER)
    accesses.reserved(MAIN, Operator("aten::empty", "a.py:1"), BUFFER)
    write(accesses, SIDE, line="a.py:2")
    (race,) = accesses.races
    assert race.first == "allocates: aten::empty on the default stream, a.py:1"
    assert race.lines == ("a.py:1", "a.py:2")


def test_reserved_memory_is_free_at_once_if_nothing_ran(accesses):
    accesses.reserved(0x20, Operator("aten::empty", "a.py:1"), BUFFER)
    write(accesses, SIDE)
    assert accesses.races == ()


def test_a_stream_that_waited_before_the_memory_was_reserved_has_waited(accesses):
    write(accesses, MAIN, OTHER)
    wait(accesses, SIDE, MAIN)
    accesses.reserved(MAIN, Operator("aten::empty", None), BUFFER)
    write(accesses, SIDE)
    assert accesses.races == ()


def view(first, count, size=4):
    return Memory(0x1000 + size * first, 0x1000, f"float32[{count}]", size, ((size, count),))


@pytest.mark.parametrize(
    ("one", "other"), [(view(0, 8), view(4, 4)), (view(4, 4), view(0, 8)), (view(0, 5), view(4, 4))]
)
def test_views_that_share_an_element_race(accesses, one, other):
    write(accesses, SIDE, one)
    read(accesses, MAIN, other)
    (race,) = accesses.races
    assert race.tensor == one.words and race.lines == ("a.py:1", "a.py:2")
    assert race.second == "reads: aten::sum on the default stream, a.py:2"


def test_views_that_share_nothing_do_not_race_though_all_of_it_was_used_before(accesses):
    write(accesses, MAIN, view(0, 8))
    wait(accesses, SIDE, MAIN)
    write(accesses, SIDE, view(0, 4))
    write(accesses, MAIN, view(4, 4))
    wait(accesses, MAIN, SIDE)
    read(accesses, MAIN, view(0, 8))
    assert accesses.races == ()


def test_views_that_are_only_read_or_used_in_order_do_not_race(accesses):
    read(accesses, SIDE, view(0, 5))
    read(accesses, MAIN, view(4, 4))
    wait(accesses, MAIN, SIDE)
    write(accesses, MAIN, view(2, 4))
    assert accesses.races == ()


def test_memory_used_again_has_forgotten_its_slices(accesses):
    accesses.allocated(0x1000, SIDE)
    write(accesses, SIDE, Memory(0x1008, 0x1000, "float32[2]"))
    accesses.freed(0x1000, None)
    accesses.allocated(0x1008, MAIN)
    write(accesses, MAIN, Memory(0x1008, 0x1008, "float32[2]"))
    assert accesses.races == ()


# Memory freed in use.


def used_on_side(accesses, pointer=0x1000):
    accesses.allocated(0x1000, MAIN)
    memory = Memory(pointer, 0x1000, "float32[4]")
    write(accesses, MAIN, memory)
    wait(accesses, SIDE, MAIN)
    read(accesses, SIDE, memory)


def runs_next(accesses, stream=MAIN):
    accesses.allocated(0x2000, stream)
    write(accesses, stream, OTHER)


@pytest.mark.parametrize("pointer", [0x1000, 0x1008], ids=["tensor", "slice"])
def test_memory_freed_in_use_is_told(accesses, pointer):
    used_on_side(accesses, pointer)
    accesses.freed(0x1000, "a.py:3")
    runs_next(accesses)
    (race,) = accesses.races
    assert race.freed and race.lines == ("a.py:2", "a.py:3")
    assert race.first == "reads: aten::sum on stream 0x10, a.py:2"
    assert race.second == "freed, of the default stream, a.py:3"


def test_memory_held_until_the_join_is_fine(accesses):
    used_on_side(accesses)
    wait(accesses, MAIN, SIDE)
    accesses.freed(0x1000, None)
    runs_next(accesses)
    assert accesses.races == ()


def test_memory_of_record_stream_is_fine(accesses):
    used_on_side(accesses)
    accesses.stream_recorded(0x1000, SIDE)
    accesses.freed(0x1000, None)
    runs_next(accesses)
    assert accesses.races == ()


def test_record_stream_of_another_stream_does_not_help(accesses):
    used_on_side(accesses)
    accesses.stream_recorded(0x1000, 0x20)
    accesses.freed(0x1000, None)
    runs_next(accesses)
    assert len(accesses.races) == 1


def test_the_owner_may_wait_before_it_allocates_again(accesses):
    """A side stream's output, used by the caller after the join and freed: the next request's fork waits for it."""
    used_on_side(accesses)
    accesses.freed(0x1000, None)
    wait(accesses, MAIN, SIDE)
    runs_next(accesses)
    assert accesses.races == ()


def test_a_wait_between_the_watched_requests_is_not_the_programs(accesses):
    used_on_side(accesses)
    accesses.freed(0x1000, "a.py:3")
    accesses.device_synchronized(by_user=False)
    runs_next(accesses)
    assert [race.freed for race in accesses.races] == [True]


def test_a_wait_of_the_program_is(accesses):
    used_on_side(accesses)
    accesses.freed(0x1000, "a.py:3")
    accesses.stream_synchronized(SIDE)
    runs_next(accesses)
    assert accesses.races == ()


def test_memory_from_before_has_no_known_stream(accesses):
    read(accesses, SIDE)
    accesses.freed(0x1000, None)
    runs_next(accesses)
    assert accesses.races == ()


def test_memory_used_on_its_own_stream_can_be_used_again(accesses):
    for _ in range(2):
        accesses.allocated(0x1000, SIDE)
        write(accesses, SIDE)
        accesses.freed(0x1000, None)
    assert accesses.races == ()
