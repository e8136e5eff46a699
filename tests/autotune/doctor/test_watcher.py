"""The doctor's watcher: what it notices, and that correct programs give nothing; on a fake GPU."""

import inspect
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from auxhead.autotune.doctor.trace import Watched
from auxhead.autotune.doctor.watching import operators, watcher
from auxhead.autotune.doctor.watching.watcher import Watcher
from support import fake_cuda_streams as fake
from torch import nn
from torch.cuda._gpu_trace import MemoryDeallocationCallbacks, StreamSynchronizationCallbacks
from torch.nn.attention.flex_attention import flex_attention


def line(offset=0):
    """The line of the caller, as evidence has it."""
    return f"test_watcher.py:{inspect.currentframe().f_back.f_lineno + offset}"


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
        watching.stream_recorded(y, side)  # as Tensor.record_stream does, which the CPU has not
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
