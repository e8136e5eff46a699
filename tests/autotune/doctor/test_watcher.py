"""The doctor's watcher: what it notices, and that correct programs give nothing; on a fake GPU."""

import inspect
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from auxhead.autotune.doctor.watched import Watched
from auxhead.autotune.doctor.watching import operators, watcher
from auxhead.autotune.doctor.watching.accesses import Accesses, Operator
from auxhead.autotune.doctor.watching.memory import Memory
from auxhead.autotune.doctor.watching.stream_uses import StreamUses
from auxhead.autotune.doctor.watching.watcher import Watcher
from support import fake_cuda_streams as fake
from torch import nn
from torch.cuda._gpu_trace import MemoryDeallocationCallbacks, StreamSynchronizationCallbacks
from torch.nn.attention.flex_attention import flex_attention

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


def line(offset=0):
    """The line of the caller, as evidence has it."""
    return f"test_watcher.py:{inspect.currentframe().f_back.f_lineno + offset}"


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


# The whole watcher, on a fake GPU.


@pytest.fixture
def main(monkeypatch):
    return fake.fake_gpu(monkeypatch)


@pytest.fixture
def side(main):
    return fake.Stream(priority=-1)


def kinds(watched):
    return [one.kind for one in watched.noticed]


def test_a_program_with_a_race_is_told_with_its_lines(main, side):
    x = torch.zeros(4)
    with Watcher() as watching:
        y = x + 1
        with torch.cuda.StreamContext(side):
            y * 2
    (race,) = watching.watched(requests=1).races
    assert race.lines == (line(-4), line(-2))
    assert race.tensor == "float32[4]"
    assert race.first == f"writes: aten::add on the default stream, {line(-6)}"
    assert race.second == f"reads: aten::mul on stream {side.cuda_stream:#x}, priority -1, {line(-5)}"


def test_the_program_put_right_gives_nothing(main, side):
    x = torch.zeros(4)
    with Watcher() as watching:
        for _ in range(2):
            y = x + 1
            side.wait_stream(main)
            with torch.cuda.StreamContext(side):
                z = y * 2
            main.wait_stream(side)
            z + y
    watched = watching.watched(requests=2)
    assert watched.races == () and watched.noticed == ()
    assert [(use.handle, use.priority, use.operators) for use in watched.streams] == [
        (0, 0, 4),
        (side.cuda_stream, -1, 2),
    ]


def test_memory_freed_in_use_is_told_with_its_lines(main, side):
    with Watcher() as watching:
        y = torch.ones(4)
        fake.allocated(y)
        y.add_(1)
        side.wait_stream(main)
        with torch.cuda.StreamContext(side):
            y * 2
        MemoryDeallocationCallbacks.fire_callbacks(y.data_ptr())
        other = torch.zeros(4)
        fake.allocated(other)
        other.add_(1)
    (race,) = watching.watched(requests=1).races
    assert race.freed and race.lines == (line(-6), line(-5))


def test_record_stream_is_seen(main, side):
    with Watcher() as watching:
        y = torch.ones(4)
        fake.allocated(y)
        side.wait_stream(main)
        with torch.cuda.StreamContext(side):
            y * 2
        watching._watch.stream_recorded(y, side)  # as Tensor.record_stream does, which the CPU has not
        fake.freed(y)
        other = torch.zeros(4)
        fake.allocated(other)
        other.add_(1)
    assert watching.watched(requests=1).races == ()


def test_views_and_factories_read_nothing(main, side):
    x = torch.zeros(4, 4)
    with Watcher() as watching:
        x.add_(1)
        with torch.cuda.StreamContext(side):
            x.view(16)[3:].t()
            x.detach().t_().squeeze_()
            torch.empty_like(x)
            torch.zeros_like(x)
            x.new_zeros(3)
    assert watching.watched(requests=1).races == ()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_an_operator_that_calls_functions_runs(main, side):
    """It is refused by dispatch modes that do not say that they take it."""
    heads = torch.ones(1, 1, 16, 16)
    with Watcher() as watching:
        heads + 1
        with torch.cuda.StreamContext(side):
            result = flex_attention(heads, heads, heads)
    assert result.shape == heads.shape
    watched = watching.watched(requests=1)
    assert (watched.races, watched.noticed) == ((), ())


def test_a_backward_is_counted_and_not_checked(main, side):
    x = torch.zeros(4, requires_grad=True)
    with Watcher() as watching:
        doubled = x * 2  # kept: the fake's allocator gives the memory of one stream to another
        y = doubled.sum()
        with torch.cuda.StreamContext(side):
            y.backward()
    watched = watching.watched(requests=1)
    assert watched.races == ()
    assert [use.handle for use in watched.streams] == [0, side.cuda_stream]


class RunsBackOn(torch.autograd.Function):
    """Its backward runs on a stream, as autograd runs one on that of the forward."""

    @staticmethod
    def forward(ctx, x, stream):
        ctx.stream = stream
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        with fake.StreamContext(ctx.stream):
            return gradient * 2, None


@pytest.mark.parametrize("call", ["backward", "grad"])
def test_a_backward_on_another_stream_than_its_block_is_noticed(main, side, call):
    x = torch.ones(4, requires_grad=True)
    with Watcher() as watching:
        y = RunsBackOn.apply(x, main)
        with torch.cuda.StreamContext(side):
            y.backward(torch.ones(4)) if call == "backward" else torch.autograd.grad(y, x, torch.ones(4))
    (noticed,) = watching.watched(requests=1).noticed
    assert (noticed.kind, noticed.of_backward, noticed.lines) == ("default-stream", True, (line(-3),))
    assert "runs 1 operators on the default stream, and none on its own" in noticed.evidence


def test_a_backward_that_runs_in_its_block_or_in_none_is_fine(main, side):
    x = torch.ones(4, requires_grad=True)
    with Watcher() as watching:
        y = RunsBackOn.apply(x, main)
        y.backward(torch.ones(4))
        with torch.cuda.StreamContext(side):
            RunsBackOn.apply(RunsBackOn.apply(x, side), main).backward(torch.ones(4))
    assert watching.watched(requests=1).noticed == ()


def test_what_is_captured_does_not_run(main, side, monkeypatch):
    monkeypatch.setattr(watcher, "is_capturing", lambda: fake.current() is side)
    x = torch.zeros(4)
    with Watcher() as watching:
        with torch.cuda.StreamContext(side):
            x + 1
        x.add_(1)
    watched = watching.watched(requests=1)
    assert watched.races == () and kinds(watched) == []
    assert [use.handle for use in watched.streams] == [0]


def test_a_copy_that_the_host_waits_for_is_over(main, side, monkeypatch):
    def synced(tensor):
        StreamSynchronizationCallbacks.fire_callbacks(fake.current().cuda_stream)
        return 0

    monkeypatch.setattr(operators, "device_of", synced)  # asked before the operator and after it
    x = torch.zeros(4)
    with Watcher() as watching:
        y = x.to(torch.float64)
        with torch.cuda.StreamContext(side):
            y.sum()
    assert watching.watched(requests=1).races == ()


@pytest.mark.parametrize("method", ["wait", "synchronize"])
def test_an_event_waited_for_before_it_is_recorded_is_noticed(main, method):
    waits = fake.Event.waits
    with Watcher() as watching:
        for _ in range(2):
            getattr(torch.cuda.Event(), method)()
    (noticed,) = watching.watched(requests=2).noticed
    assert (noticed.kind, noticed.lines) == ("unrecorded-event", (line(-2),))
    assert fake.Event.waits == waits + 2


def test_a_wait_of_the_host_is_noticed_with_its_line_and_other_warnings_are_shown(main, recwarn):
    with Watcher() as watching:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)  # as PyTorch does
        warnings.warn("something else", stacklevel=1)
    (noticed,) = watching.watched(requests=2).noticed
    assert (noticed.kind, noticed.lines) == ("host-wait", (line(-3),))
    assert [str(one.message) for one in recwarn] == ["something else"]


def test_a_recorded_event_is_fine(main, side):
    with Watcher() as watching:
        event = torch.cuda.Event()
        event.record()
        event.wait(side)
        event.synchronize()
    assert watching.watched(requests=1).noticed == ()


def test_a_polled_event_gives_an_order(main, side):
    x = torch.zeros(4)
    event = torch.cuda.Event()
    with Watcher() as watching:
        y = x + 1
        event.record()
        assert event.query()
        with torch.cuda.StreamContext(side):
            y * 2
    assert watching.watched(requests=1).races == ()


def test_the_class_in_place_of_the_context_is_noticed(main, side):
    x = torch.zeros(4)
    with Watcher() as watching:
        with torch.cuda.Stream(side):
            x + 1
    watched = watching.watched(requests=1)
    (noticed,) = watched.noticed
    assert (noticed.kind, noticed.lines) == ("stream-class", (line(-4),))


@pytest.mark.parametrize("enter", [fake.StreamContext, lambda stream: stream], ids=["context", "stream"])
def test_a_block_that_nothing_runs_in_is_noticed(main, side, enter):
    x = torch.zeros(4)
    with Watcher() as watching:
        for _ in range(2):
            with enter(side):
                pass
            x + 1
    watched = watching.watched(requests=2)
    (noticed,) = watched.noticed
    assert (noticed.kind, noticed.lines) == ("default-stream", (line(-5),))
    assert "all 2 operators run on the default stream" in noticed.evidence


def test_a_block_that_something_runs_in_is_fine(main, side):
    x = torch.zeros(4)
    with Watcher() as watching:
        with side:
            x + 1
    watched = watching.watched(requests=1)
    assert watched.noticed == ()
    assert [use.handle for use in watched.streams] == [side.cuda_stream]


def test_an_empty_block_beside_streams_in_use_is_none(main, side):
    x = torch.zeros(4)
    with Watcher() as watching:
        with torch.cuda.StreamContext(side):
            side.query()
        with torch.cuda.StreamContext(side):
            x + 1
    assert watching.watched(requests=1).noticed == ()


def test_an_empty_block_on_the_stream_that_all_runs_on_is_none(main):
    with Watcher() as watching:
        with torch.cuda.StreamContext(main):
            pass
        torch.zeros(4) + 1
    assert watching.watched(requests=1).noticed == ()


@pytest.mark.parametrize("launch", ["graph", "cuda.bindings"])
def test_a_block_that_launches_something_else_is_fine(main, side, launch, monkeypatch):
    runtime = pytest.importorskip("cuda.bindings.runtime")
    launched = []
    monkeypatch.setattr(runtime, "cudaGraphLaunch", lambda *arguments: launched.append(arguments))
    with Watcher() as watching:
        torch.zeros(4) + 1
        with torch.cuda.StreamContext(side):
            if launch == "graph":
                assert torch.cuda.CUDAGraph().replay() == "replayed"
            else:
                runtime.cudaGraphLaunch(1, 2)
    watched = watching.watched(requests=1)
    assert watched.noticed == ()
    assert [use.operators > 0 for use in watched.streams] == [True]
    assert launched == ([] if launch == "graph" else [(1, 2)])


def test_a_launch_of_triton_counts(main, side):
    hook = pytest.importorskip("triton.knobs").runtime.launch_enter_hook
    before = [*hook.calls]
    with Watcher() as watching:
        with torch.cuda.StreamContext(side):
            hook({})
    assert [(use.handle, use.operators) for use in watching.watched(requests=1).streams] == [(side.cuda_stream, 1)]
    assert hook.calls == before


def test_a_block_that_torch_or_auxhead_enters_is_none(main, side):
    entering = compile("def enter(block):\n    with block: pass", watcher.__file__.replace("autotune", "model"), "exec")
    names = {}
    exec(entering, names)
    with Watcher() as watching:
        names["enter"](torch.cuda.StreamContext(side))
        torch.zeros(4) + 1
    assert watching.watched(requests=1).noticed == ()


def test_a_stream_that_runs_nothing_is_told(main, side):
    with Watcher() as watching:
        made = torch.cuda.Stream(priority=-2)
        torch.zeros(4) + 1
    streams = {use.handle: (use.priority, use.operators) for use in watching.watched(requests=1).streams}
    assert streams[0] == (0, 2)
    assert streams[made.cuda_stream] == (-2, 0)
    assert streams[side.cuda_stream] == (-1, 0)  # it was there before


def test_a_stream_that_torch_compile_keeps_is_not_of_the_program(main, monkeypatch):
    kept = torch.cuda.Stream()
    trees = SimpleNamespace(get_manager=lambda device, create_if_none_exists: SimpleNamespace(stream=kept))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with Watcher() as watching:
        torch.zeros(4) + 1
    assert kept.cuda_stream not in {use.handle for use in watching.watched(requests=1).streams}


def test_an_operator_on_another_device_than_its_block_is_noticed(main, side, monkeypatch):
    monkeypatch.setattr(operators, "device_of", lambda tensor: 1)
    x = torch.zeros(4)
    with Watcher() as watching:
        with torch.cuda.StreamContext(side):
            x + 1
    (noticed,) = watching.watched(requests=1).noticed
    assert (noticed.kind, noticed.lines) == ("mixed-devices", (line(-2), line(-3)))
    assert "cuda:1" in noticed.evidence and "cuda:0" in noticed.evidence


def test_a_block_of_its_device_further_out_is_fine(main, side, monkeypatch):
    monkeypatch.setattr(operators, "device_of", lambda tensor: 1)
    with Watcher() as watching:
        with torch.cuda.StreamContext(fake.Stream(index=1)), torch.cuda.StreamContext(side):
            torch.zeros(4) + 1
    assert watching.watched(requests=1).noticed == ()


def test_a_nested_block_in_which_nothing_runs_on_its_own_device_is_noticed(main, side, monkeypatch):
    monkeypatch.setattr(operators, "device_of", lambda tensor: 1)
    with Watcher() as watching:
        with torch.cuda.StreamContext(fake.Stream(index=1)):
            torch.zeros(4) + 1
            with torch.cuda.StreamContext(side):
                torch.zeros(4) + 1
    (noticed,) = watching.watched(requests=1).noticed
    assert (noticed.kind, noticed.lines) == ("mixed-devices", (line(-2), line(-3)))


def test_a_nested_block_in_which_both_devices_run_is_fine(main, side, monkeypatch):
    with Watcher() as watching:
        with torch.cuda.StreamContext(fake.Stream(index=1)):
            with torch.cuda.StreamContext(side):
                for device in (1, 0):
                    monkeypatch.setattr(operators, "device_of", lambda tensor, device=device: device)
                    torch.zeros(4) + 1
    assert watching.watched(requests=1).noticed == ()


def test_a_device_chosen_within_the_block_is_fine(main, side, monkeypatch):
    monkeypatch.setattr(operators, "device_of", lambda tensor: 1)
    with Watcher() as watching:
        with torch.cuda.StreamContext(side):
            monkeypatch.setattr(watcher, "current_device", lambda: 1)
            torch.zeros(4) + 1
    assert watching.watched(requests=1).noticed == ()


def test_inference_of_a_module_gives_nothing(main):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).eval()
    with torch.inference_mode(), Watcher() as watching:
        for _ in range(2):
            net(torch.randn(2, 3, 8, 8)).argmax().item()
    watched = watching.watched(requests=2)
    assert (watched.races, watched.noticed) == ((), ())
    assert [use.handle for use in watched.streams if use.operators] == [0]


def test_a_second_watcher_starts_afresh(main, side):
    x = torch.zeros(4)
    with Watcher() as first:
        x.add_(1)
    with Watcher() as second:
        with torch.cuda.StreamContext(side):
            x.add_(1)
    assert first.watched(requests=1).races == second.watched(requests=1).races == ()
    assert [use.handle for use in second.watched(requests=1).streams] == [side.cuda_stream]


def test_torch_is_afterwards_as_it_was(main, side):
    owned = {kind: dict(vars(kind)) for kind in (fake.Stream, fake.StreamContext, fake.Event, fake.CUDAGraph)}
    with pytest.raises(ValueError, match="of the program"), Watcher():
        assert any(dict(vars(kind)) != before for kind, before in owned.items())
        raise ValueError("of the program")
    for kind, before in owned.items():
        assert dict(vars(kind)) == before
    x = torch.zeros(4)
    fake.allocated(x)  # what torch calls does nothing then
    fake.freed(x)


def test_only_one_is_open(main):
    with Watcher():
        with pytest.raises(RuntimeError, match="another one is open"), Watcher():
            pass


def test_without_cuda_it_sees_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with Watcher() as watching:
        torch.zeros(4) + 1
    assert watching.watched(requests=3) == Watched(requests=3)
