"""The doctor's watcher: what it notices, and that correct programs give nothing; on a fake GPU, and on a real one."""

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from auxhead.autotune.doctor.trace import Watched
from auxhead.autotune.doctor.watching import operators, watcher
from auxhead.autotune.doctor.watching.operators import memory_of_graph, noting_captures
from auxhead.autotune.doctor.watching.watcher import Watcher
from support.stream_order import CUDAGraph, Stream
from support.watched_requests import current, faults, marked_line, used, watched
from torch import nn
from torch.cuda import _gpu_trace
from torch.nn.attention.flex_attention import flex_attention

SIZE = 1 << 20


def line(mark):
    return marked_line(__file__, mark)


def allocated(tensor):
    """Tell that the memory of a tensor was allocated on the current stream."""
    _gpu_trace.MemoryAllocationCallbacks.fire_callbacks(tensor.untyped_storage().data_ptr())


def freed(tensor):
    """Tell that the memory of a tensor is given back."""
    _gpu_trace.MemoryDeallocationCallbacks.fire_callbacks(tensor.untyped_storage().data_ptr())


# On both. Accesses.


def test_a_missing_wait_before_a_read(where, other):
    def request():
        a = torch.full((SIZE,), 1.0, device=where)  # writes a
        with torch.cuda.stream(other):
            b = a * 2  # reads a
        current().wait_stream(other)
        return b

    seen = watched(request)
    (race,) = seen.races
    assert race.lines == (line("writes a"), line("reads a")) and not race.freed
    assert race.tensor == f"float32[{SIZE}]"
    assert race.first == f"writes: aten::full on the default stream, {line('writes a')}"
    assert race.second == f"reads: aten::mul on stream {other.cuda_stream:#x}, priority -1, {line('reads a')}"
    assert seen.noticed == ()


def test_fork_and_join_are_fine(where, other):
    x = torch.ones(SIZE, device=where)

    def request():
        a = x + 1
        other.wait_stream(current())
        with torch.cuda.stream(other):
            b = a * 2
        c = a * 3
        current().wait_stream(other)
        return b + c

    seen = watched(request)
    assert faults(seen) == []
    uses = [(use.handle, use.device, use.priority, use.operators) for use in seen.streams]
    assert uses == [(0, 0, 0, 6), (other.cuda_stream, 0, -1, 2)]


def test_waits_of_the_host_are_an_order(where, other):
    a, event = torch.ones(SIZE, device=where), torch.cuda.Event()

    def request():
        a.add_(1)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            a.mul_(2)
        event.record(other)
        while not event.query():
            pass
        a.add_(1)

    assert faults(watched(request)) == []


# On both. Misused streams and events.


@pytest.mark.parametrize("wait", ["wait", "wait_event", "synchronize"])
def test_an_event_that_was_not_recorded(where, other, wait):
    def request():
        event = torch.cuda.Event()
        if wait == "wait":
            event.wait(other)  # wait
        elif wait == "wait_event":
            other.wait_event(event)  # wait_event
        else:
            event.synchronize()  # synchronize
        event.record()

    (noticed,) = watched(request).noticed
    assert (noticed.kind, noticed.lines) == ("unrecorded-event", (line(wait),))


def test_an_event_that_was_recorded(where, other):
    def request():
        event = torch.cuda.Event()
        event.record()
        event.wait(other)
        other.wait_event(event)
        event.synchronize()

    assert faults(watched(request)) == []


@pytest.mark.parametrize("way", ["class", "stream"])
def test_the_class_in_place_of_the_context_and_the_stream_as_one(where, other, way):
    a = torch.zeros(SIZE, device=where)

    def request():
        if way == "class":
            with torch.cuda.Stream(other):  # the class
                a * 2
        else:
            with other:
                a * 2

    seen = watched(request)
    if way == "class":
        assert [(one.kind, one.lines) for one in seen.noticed] == [("stream-class", (line("the class"),))]
    else:
        assert faults(seen) == [] and used(seen) == [(other.cuda_stream, 2)]


@pytest.mark.parametrize("context", ["function", "stream"])
def test_a_block_that_nothing_runs_in(where, other, context):
    a = torch.zeros(SIZE, device=where)

    def request():
        if context == "function":
            with torch.cuda.stream(other):  # function
                pass
        else:
            with other:  # stream
                pass
        a * 2

    seen = watched(request)
    (noticed,) = seen.noticed
    assert (noticed.kind, noticed.lines) == ("default-stream", (line(context),))
    assert "all 2 operators run on the default stream" in noticed.evidence
    assert {(use.handle, use.operators) for use in seen.streams} >= {(0, 2), (other.cuda_stream, 0)}


def test_a_stream_that_is_never_current(where, other):
    x = torch.zeros(8, 8, device=where)

    def request():
        other.wait_stream(current())
        x + 1
        current().wait_stream(other)

    seen = watched(request)
    assert (other.cuda_stream, -1, 0) in {(use.handle, use.priority, use.operators) for use in seen.streams}


@pytest.mark.parametrize("enters", [False, True])
def test_a_thread_of_a_pool_and_one_of_its_own(where, other, enters):
    x = torch.ones(SIZE, device=where)

    def launch():
        with torch.no_grad(), torch.cuda.stream(other if enters else None):
            x * 2

    def in_thread():
        thread = threading.Thread(target=launch)
        thread.start()
        thread.join()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # its worker is there before the watcher
        for run in (lambda: pool.submit(launch).result(), in_thread):

            def request(run=run):
                other.wait_stream(current())
                with torch.cuda.stream(other):
                    run()
                x.sum()
                current().wait_stream(other)

            assert faults(watched(request)) == ([] if enters else ["default-stream"])


def test_a_second_watcher_starts_afresh(where, other):
    a = torch.zeros(SIZE, device=where)

    def write():
        a.add_(1)

    def read():
        with torch.cuda.stream(other):
            a * 2

    first, second = watched(write), watched(read)
    assert faults(first) == faults(second) == [] and used(second) == [(other.cuda_stream, 2)]


def test_torch_is_afterwards_as_it_was(where, other):
    names = ("Stream", "Event", "StreamContext", "CUDAGraph")
    owned = {getattr(torch.cuda, name): dict(vars(getattr(torch.cuda, name))) for name in names}
    threads = ThreadPoolExecutor.submit, threading.Thread.start
    with pytest.raises(ValueError, match="of the program"), Watcher():
        assert any(dict(vars(kind)) != before for kind, before in owned.items())
        raise ValueError("of the program")
    assert {kind: dict(vars(kind)) for kind in owned} == owned
    assert (ThreadPoolExecutor.submit, threading.Thread.start) == threads


# On a fake GPU alone. Accesses.


def test_memory_freed_in_use_is_told_with_its_lines_but_not_after_record_stream(main, side):
    for recorded in (False, True):
        with Watcher() as watching:
            y = torch.ones(4)
            allocated(y)
            y.add_(1)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                y * 2  # uses y
            if recorded:
                watching.stream_recorded(y, side)  # as Tensor.record_stream does, which the CPU has not
            freed(y)  # frees y
            other = torch.zeros(4)
            allocated(other)
            other.add_(1)
        races = watching.watched(requests=1).races
        assert [(race.freed, race.lines[0]) for race in races] == ([] if recorded else [(True, line("uses y"))])


def test_views_and_factories_read_nothing(main, side):
    x = torch.zeros(4, 4)
    with Watcher() as watching:
        x.add_(1)
        with torch.cuda.stream(side):
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
        with torch.cuda.stream(side):
            result = flex_attention(heads, heads, heads)
    assert result.shape == heads.shape
    assert faults(watching.watched(requests=1)) == []


def test_a_copy_that_the_host_waits_for_is_over(main, side, monkeypatch):
    def synced(tensor):
        _gpu_trace.StreamSynchronizationCallbacks.fire_callbacks(current().cuda_stream)
        return 0

    monkeypatch.setattr(operators, "device_of", synced)  # asked before the operator and after it
    x = torch.zeros(4)
    with Watcher() as watching:
        y = x.to(torch.float64)
        with torch.cuda.stream(side):
            y.sum()
    assert watching.watched(requests=1).races == ()


def test_what_is_captured_does_not_run(main, side, monkeypatch):
    monkeypatch.setattr(watcher, "is_capturing", lambda: current() is side)
    x = torch.zeros(4)
    with Watcher() as watching:
        with torch.cuda.stream(side):
            x + 1
        x.add_(1)
    seen = watching.watched(requests=1)
    assert faults(seen) == [] and [use.handle for use in seen.streams] == [0]


# On a fake GPU alone. Backwards.


def test_a_backward_is_counted_and_not_checked(main, side):
    x = torch.zeros(4, requires_grad=True)
    with Watcher() as watching:
        doubled = x * 2  # kept: the fake's allocator gives the memory of one stream to another
        y = doubled.sum()
        with torch.cuda.stream(side):
            y.backward()
    seen = watching.watched(requests=1)
    assert seen.races == () and [use.handle for use in seen.streams] == [0, side.cuda_stream]


# On a fake GPU alone. Streams and blocks.


def test_a_wait_of_the_host_is_noticed_with_its_line_and_other_warnings_are_shown(main, recwarn):
    with Watcher() as watching:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)  # as PyTorch does
        warnings.warn("something else", stacklevel=1)
    (noticed,) = watching.watched(requests=2).noticed
    assert (noticed.kind, noticed.lines) == ("host-wait", (line("as PyTorch does"),))
    assert [str(one.message) for one in recwarn] == ["something else"]


def test_a_block_that_nothing_runs_in_is_none_where_its_stream_is_in_use(main, side):
    x = torch.zeros(4)
    with Watcher() as watching:
        with torch.cuda.stream(side):
            side.query()
        with torch.cuda.stream(side):
            x + 1
    assert watching.watched(requests=1).noticed == ()
    with Watcher() as watching:
        with torch.cuda.stream(main):
            pass
        x + 1
    assert watching.watched(requests=1).noticed == ()


def test_an_empty_block_of_another_thread_is_its_own(main, side):
    def work():
        with torch.cuda.stream(side):
            pass

    with ThreadPoolExecutor(1) as pool, Watcher() as watching:
        with torch.cuda.stream(side):
            torch.zeros(4) + 1
            pool.submit(work).result()
        torch.zeros(4) + 1
    assert watching.watched(requests=1).noticed == ()


@pytest.mark.parametrize("launch", ["graph", "cuda.bindings"])
def test_a_block_that_launches_something_else_is_fine(main, side, launch, monkeypatch):
    runtime = pytest.importorskip("cuda.bindings.runtime")
    launched = []
    monkeypatch.setattr(runtime, "cudaGraphLaunch", lambda *arguments: launched.append(arguments))
    with Watcher() as watching:
        torch.zeros(4) + 1
        with torch.cuda.stream(side):
            if launch == "graph":
                assert torch.cuda.CUDAGraph().replay() == "replayed"
            else:
                runtime.cudaGraphLaunch(1, 2)
    seen = watching.watched(requests=1)
    assert seen.noticed == () and [use.operators > 0 for use in seen.streams] == [True]
    assert launched == ([] if launch == "graph" else [(1, 2)])


def test_a_launch_of_triton_counts(main, side):
    hook = pytest.importorskip("triton.knobs").runtime.launch_enter_hook
    before = [*hook.calls]
    with Watcher() as watching:
        with torch.cuda.stream(side):
            hook({})
    assert used(watching.watched(requests=1)) == [(side.cuda_stream, 1)]
    assert hook.calls == before


def test_a_block_that_torch_or_auxhead_enters_is_none(main, side):
    entering = compile("def enter(block):\n    with block: pass", watcher.__file__.replace("autotune", "model"), "exec")
    exec(entering, names := {})
    with Watcher() as watching:
        names["enter"](torch.cuda.stream(side))
        torch.zeros(4) + 1
    assert watching.watched(requests=1).noticed == ()


def test_streams_that_run_nothing_are_told_but_not_one_that_torch_compile_keeps(main, side, monkeypatch):
    kept = torch.cuda.Stream()
    trees = SimpleNamespace(get_manager=lambda device, create_if_none_exists: SimpleNamespace(stream=kept))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with Watcher() as watching:
        made = torch.cuda.Stream(priority=-2)
        torch.zeros(4) + 1
    streams = {use.handle: (use.priority, use.operators) for use in watching.watched(requests=1).streams}
    assert streams[0] == (0, 2) and streams[made.cuda_stream] == (-2, 0)
    assert streams[side.cuda_stream] == (-1, 0)  # it was there before
    assert kept.cuda_stream not in streams


# On a fake GPU alone. Several devices.


def test_an_operator_on_another_device_than_its_block_is_noticed(main, side, monkeypatch):
    monkeypatch.setattr(operators, "device_of", lambda tensor: 1)
    x = torch.zeros(4)
    with Watcher() as watching:
        with torch.cuda.stream(side):  # of cuda:0
            x + 1  # on cuda:1
    (noticed,) = watching.watched(requests=1).noticed
    assert (noticed.kind, noticed.lines) == ("mixed-devices", (line("on cuda:1"), line("of cuda:0")))
    assert "cuda:1" in noticed.evidence and "cuda:0" in noticed.evidence


def test_a_nested_block_in_which_nothing_runs_on_its_own_device_is_noticed(main, side, monkeypatch):
    monkeypatch.setattr(operators, "device_of", lambda tensor: 1)
    with Watcher() as watching:
        with torch.cuda.stream(Stream(index=1)):
            torch.zeros(4) + 1
            with torch.cuda.stream(side):  # nested
                torch.zeros(4).add_(1)
    assert {(one.kind, one.lines[-1]) for one in watching.watched(requests=1).noticed} == {
        ("mixed-devices", line("nested"))
    }


@pytest.mark.parametrize("program", ["further out", "both run", "chosen within"])
def test_blocks_of_two_devices_are_fine(main, side, monkeypatch, program):
    monkeypatch.setattr(operators, "device_of", lambda tensor: 1)
    with Watcher() as watching:
        if program == "chosen within":
            with torch.cuda.stream(side):
                monkeypatch.setattr(watcher, "current_device", lambda: 1)
                torch.zeros(4) + 1
        else:
            with torch.cuda.stream(Stream(index=1)), torch.cuda.stream(side):
                torch.zeros(4) + 1
                if program == "both run":
                    monkeypatch.setattr(operators, "device_of", lambda tensor: 0)
                    torch.zeros(4) + 1
    assert watching.watched(requests=1).noticed == ()


# On a fake GPU alone. The memory of graphs.


class Doubled:
    """A graph that doubles its static input."""

    def __init__(self):
        self.x, self.graph = torch.zeros(4), torch.cuda.CUDAGraph()
        self.graph.capture_begin()
        self.y = self.x * 2
        self.graph.capture_end()


def written_by_another_stream(graph, main, side):
    with torch.cuda.stream(side):
        graph.x.fill_(3)
    graph.graph.replay()


def read_by_another_stream(graph, main, side):
    graph.graph.replay()
    with torch.cuda.stream(side):
        graph.y[1:].sum()


def overwritten_while_it_is_read(graph, main, side):
    graph.graph.replay()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        graph.y.sum()
    graph.graph.replay()


def in_order(graph, main, side):
    for _ in range(2):
        with torch.cuda.stream(side):
            graph.x.fill_(3)
        main.wait_stream(side)
        graph.graph.replay()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            graph.y.sum()
        main.wait_stream(side)


@pytest.mark.parametrize(
    ("program", "races"),
    [
        (written_by_another_stream, [("writes: aten::fill_", "reads: a graph's replay")]),
        (read_by_another_stream, [("writes: a graph's replay", "reads: aten::sum")]),
        (overwritten_while_it_is_read, [("reads: aten::sum", "writes: a graph's replay")]),
        (in_order, []),
    ],
)
def test_the_memory_of_a_graph_is_known_where_its_capture_was_noted(main, side, program, races):
    with noting_captures():
        noted = Doubled()
    with Watcher() as watching:
        program(noted, main, side)
    seen = watching.watched(requests=1).races
    assert [(race.first.partition(" on ")[0], race.second.partition(" on ")[0]) for race in seen] == races
    assert all(each.startswith("test_watcher.py:") for race in seen for each in race.lines)
    assert {len(race.lines) for race in seen} <= {2}
    before = Doubled()
    assert memory_of_graph(before.graph) is None
    with Watcher() as watching:
        program(before, main, side)
    assert not [race for race in watching.watched(requests=1).races if "replay" in race.first + race.second]


def test_what_is_compiled_is_captured_compiled_and_stays_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    runs = []

    def backend(module, _inputs):
        return lambda *args: runs.append("compiled") or module(*args)

    compiled, graph, x = torch.compile(lambda x: x * 2, backend=backend), torch.cuda.CUDAGraph(), torch.ones(4)
    compiled(x)
    with noting_captures():
        graph.capture_begin()
        compiled(x)
        graph.capture_end()
    compiled(x)
    assert len(runs) == 3


def test_a_failed_capture_leaves_no_mode_and_the_methods_as_they_were(main):
    before = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(KeyError), noting_captures():
        graph.capture_begin()
        try:
            raise KeyError
        finally:
            graph.capture_end()  # as torch.cuda.graph does
    assert (torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end) == before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


# The watcher itself.


def test_inference_of_a_module_gives_nothing(main):
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).eval()
    with torch.inference_mode(), Watcher() as watching:
        for _ in range(2):
            net(torch.randn(2, 3, 8, 8)).argmax().item()
    seen = watching.watched(requests=2)
    assert faults(seen) == [] and [handle for handle, _ in used(seen)] == [0]


def test_a_pools_own_thread_is_not_watched_for_good(main):
    x = torch.zeros(4)
    with ThreadPoolExecutor(1) as pool:
        with Watcher() as watching:
            pool.submit(lambda: x + 1).result()
        pool.submit(lambda: x + 1).result()
    assert used(watching.watched(requests=1)) == [(0, 1)]


def test_what_torch_calls_does_nothing_afterwards_and_only_one_is_open(main):
    with Watcher():
        with pytest.raises(RuntimeError, match="another one is open"), Watcher():
            pass
    x = torch.zeros(4)
    allocated(x)
    freed(x)


def test_without_cuda_it_sees_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with Watcher() as watching:
        torch.zeros(4) + 1
    assert watching.watched(requests=3) == Watched(requests=3)
