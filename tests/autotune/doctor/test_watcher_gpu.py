"""The doctor's watcher on a GPU: each planted mistake is noticed, and the same program put right gives nothing."""

import logging
from pathlib import Path

import pytest
import torch
from auxhead.autotune.doctor.trace import Watched
from auxhead.autotune.doctor.watching.watcher import Watcher
from auxhead.model import make_runner
from support.gpu_work import warm_stream
from support.graph_runner_cases import WAYS, clear_batches, network
from torch import nn
from torch._inductor.cudagraph_trees import get_manager
from torchvision.models import resnet18

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = pytest.mark.gpu
SIZE = 1 << 20
_SOURCE = Path(__file__).read_text().splitlines()


def line(mark):
    """The line of this file that ends with a mark, as evidence has it."""
    (number,) = (number for number, text in enumerate(_SOURCE, 1) if text.endswith(f"# {mark}"))
    return f"{Path(__file__).name}:{number}"


@pytest.fixture
def side():
    return warm_stream()


def watched(request, requests=2) -> Watched:
    with torch.no_grad(), Watcher() as watching:
        for _ in range(requests):
            request()
    torch.cuda.synchronize()
    return watching.watched(requests)


def main():
    return torch.cuda.current_stream()


def nothing(seen: Watched):
    """Whether there is no fault; lines where the host waits are told of each program that asks for its answer."""
    return (seen.races, {one.kind for one in seen.noticed} - {"host-wait"}) == ((), set())


# 1. Races.


def test_a_missing_wait_before_a_read(side):
    def request():
        a = torch.full((SIZE,), 1.0, device="cuda")  # writes a
        with torch.cuda.stream(side):
            b = a * 2  # reads a
        main().wait_stream(side)
        return b

    seen = watched(request)
    (race,) = seen.races
    assert race.lines == (line("writes a"), line("reads a")) and not race.freed
    assert race.tensor == f"float32[{SIZE}]"
    assert race.first == f"writes: aten::full on the default stream, {line('writes a')}"
    assert race.second == f"reads: aten::mul on stream {side.cuda_stream:#x}, priority -1, {line('reads a')}"
    assert seen.noticed == ()


def test_a_missing_wait_before_a_write(side):
    buffer = torch.zeros(SIZE, device="cuda")

    def request():
        side.wait_stream(main())
        with torch.cuda.stream(side):
            buffer.sum()  # reads the buffer
        buffer.add_(1)  # overwrites the buffer

    assert [race.lines for race in watched(request, 1).races] == [
        (line("reads the buffer"), line("overwrites the buffer"))
    ]


def test_fork_and_join_are_fine(side):
    def request():
        a = torch.full((SIZE,), 1.0, device="cuda")
        side.wait_stream(main())
        with torch.cuda.stream(side):
            b = a * 2
        c = a * 3
        main().wait_stream(side)
        return b + c

    seen = watched(request)
    assert nothing(seen)
    assert {(use.handle, use.device, use.priority) for use in seen.streams} == {(0, 0, 0), (side.cuda_stream, 0, -1)}
    assert [use.operators for use in seen.streams] == [6, 2]


def test_two_streams_that_take_turns_by_events_are_fine(side):
    other = torch.cuda.Stream()
    buffers = [torch.zeros(SIZE, device="cuda") for _ in range(2)]
    filled, used = ([torch.cuda.Event() for _ in range(2)] for _ in range(2))
    for event in used:
        event.record()

    def request():
        for index, buffer in enumerate(buffers):
            side.wait_event(used[index])
            with torch.cuda.stream(side):
                buffer.add_(1)
            filled[index].record(side)
            other.wait_event(filled[index])
            with torch.cuda.stream(other):
                buffer.sum()
            used[index].record(other)

    assert nothing(watched(request))


def test_waits_of_the_host_are_an_order(side):
    event = torch.cuda.Event()

    def request():
        a = torch.full((SIZE,), 1.0, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            total = a.sum()
            if total.item() > 0:
                a.add_(1)
        event.record(side)
        while not event.query():
            pass
        a.add_(total)

    assert nothing(watched(request))


def test_a_copy_that_the_host_waits_for_is_an_order(side):
    host = torch.zeros(SIZE)

    def request():
        a = host.to("cuda")
        with torch.cuda.stream(side):
            b = a.sum().cpu()
        a.add_(b.item())

    assert nothing(watched(request))


def test_copies_of_pinned_memory_with_an_event_are_fine(side):
    host = torch.zeros(SIZE).pin_memory()
    copied = torch.cuda.Event()

    def request():
        with torch.cuda.stream(side):
            x = host.to("cuda", non_blocking=True)
            copied.record()
        main().wait_event(copied)
        x.record_stream(main())
        return x * 2

    assert nothing(watched(request, 3))


def test_a_tensor_from_before_is_fine(side):
    kept = [torch.zeros(SIZE, device="cuda") for _ in range(3)]

    def request():
        with torch.cuda.stream(side):
            (kept[-1][5:] * 2).sum()
        kept.pop()
        torch.zeros(SIZE, device="cuda")

    assert nothing(watched(request, 3))


# 2. Freed in use.


def test_a_tensor_freed_while_another_stream_uses_it(side):
    def request():
        a = torch.full((SIZE,), 1.0, device="cuda")
        side.wait_stream(main())
        with torch.cuda.stream(side):
            r = a * 2  # uses a
        del a  # frees a
        b = torch.full((SIZE,), 3.0, device="cuda")
        main().wait_stream(side)
        return b, r

    (race,) = watched(request).races
    assert race.freed and race.lines == (line("uses a"), line("frees a"))
    assert race.second == f"freed, of the default stream, {line('frees a')}"


def test_a_slice_in_use_keeps_nothing(side):
    def request():
        a = torch.full((SIZE,), 1.0, device="cuda")
        side.wait_stream(main())
        with torch.cuda.stream(side):
            a[5:].sum()  # uses a slice
        del a  # frees the slice
        b = torch.full((SIZE,), 3.0, device="cuda")
        main().wait_stream(side)
        return b

    assert [race.lines for race in watched(request).races if race.freed] == [
        (line("uses a slice"), line("frees the slice"))
    ]


@pytest.mark.parametrize("remedy", ["record_stream", "held"])
def test_a_tensor_that_is_recorded_or_held_is_fine(side, remedy):
    def request():
        a = torch.full((SIZE,), 1.0, device="cuda")
        side.wait_stream(main())
        with torch.cuda.stream(side):
            r = a * 2
        if remedy == "record_stream":
            a.record_stream(side)
        else:
            main().wait_stream(side)
        del a
        b = torch.full((SIZE,), 3.0, device="cuda")
        main().wait_stream(side)
        return b, r

    assert nothing(watched(request))


def test_a_side_streams_output_is_fine_where_the_next_fork_waits(side):
    def request():
        a = torch.full((SIZE,), 1.0, device="cuda")
        side.wait_stream(main())
        with torch.cuda.stream(side):
            b = a * 2
        main().wait_stream(side)
        return b + a

    assert nothing(watched(request, 4))


def test_memory_used_again_on_one_stream_is_fine(side):
    def request():
        with torch.cuda.stream(side):
            for _ in range(4):
                torch.full((SIZE,), 1.0, device="cuda").mul_(2)

    assert nothing(watched(request))


# 3. Events waited for before they are recorded.


@pytest.mark.parametrize("wait", ["wait", "wait_event", "synchronize"])
def test_an_event_that_was_not_recorded(side, wait):
    def request():
        event = torch.cuda.Event()
        if wait == "wait":
            event.wait(side)  # wait
        elif wait == "wait_event":
            side.wait_event(event)  # wait_event
        else:
            event.synchronize()  # synchronize
        event.record()

    (noticed,) = watched(request).noticed
    assert (noticed.kind, noticed.lines) == ("unrecorded-event", (line(wait),))


def test_an_event_that_was_recorded(side):
    def request():
        event = torch.cuda.Event()
        event.record()
        event.wait(side)
        side.wait_event(event)
        event.synchronize()

    assert nothing(watched(request))


# 4. The class in place of the context.


def test_the_class_in_place_of_the_context(side):
    a = torch.zeros(SIZE, device="cuda")

    def request():
        with torch.cuda.Stream(side):  # the class
            a * 2

    assert [(one.kind, one.lines) for one in watched(request).noticed] == [("stream-class", (line("the class"),))]


def test_the_stream_itself_as_a_context(side):
    a = torch.zeros(SIZE, device="cuda")

    def request():
        with side:
            a * 2

    seen = watched(request)
    assert nothing(seen)
    assert [(use.handle, use.operators) for use in seen.streams if use.operators] == [(side.cuda_stream, 2)]


# 5. Everything on one stream.


@pytest.mark.parametrize("context", ["function", "stream"])
def test_a_block_that_nothing_runs_in(side, context):
    a = torch.zeros(SIZE, device="cuda")

    def request():
        if context == "function":
            with torch.cuda.stream(side):  # function
                pass
        else:
            with side:  # stream
                pass
        a * 2

    seen = watched(request)
    assert [(one.kind, one.lines) for one in seen.noticed] == [("default-stream", (line(context),))]
    assert {(use.handle, use.operators) for use in seen.streams} >= {(0, 2), (side.cuda_stream, 0)}


def test_a_stream_that_is_never_current(side):
    net = nn.Linear(8, 8).cuda()
    x = torch.zeros(8, 8, device="cuda")

    def request():
        side.wait_stream(main())
        net(x)
        main().wait_stream(side)

    seen = watched(request)
    assert (side.cuda_stream, -1, 0) in {(use.handle, use.priority, use.operators) for use in seen.streams}


def test_a_block_in_which_a_graph_is_replayed(side):
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(SIZE, device="cuda")
    with torch.cuda.graph(graph):
        x.add_(1)

    def request():
        side.wait_stream(main())
        with torch.cuda.stream(side):
            graph.replay()
        main().wait_stream(side)
        torch.zeros(4, device="cuda")

    seen = watched(request)
    assert nothing(seen) and all(use.operators for use in seen.streams)


@triton.jit
def _double(x, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    tl.store(x + offsets, 2 * tl.load(x + offsets, mask=mask), mask=mask)


def test_a_block_in_which_triton_launches(side):
    x = torch.zeros(SIZE, device="cuda")

    def request():
        with torch.cuda.stream(side):
            _double[(SIZE // 1024,)](x, SIZE, BLOCK=1024)
        torch.zeros(4, device="cuda")

    seen = watched(request)
    assert nothing(seen)
    assert {(use.handle, use.operators) for use in seen.streams} == {(0, 2), (side.cuda_stream, 2)}


def test_a_graph_captured_within_a_request_runs_later(side):
    x, z = torch.zeros(64, 64, device="cuda"), torch.ones(64, 64, device="cuda")

    def request():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x @ x
        graph.replay()
        x.copy_(z)

    assert nothing(watched(request))


# 6. Several devices.

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
def test_an_operator_on_another_device_than_its_block(side):
    x = torch.zeros(SIZE, device="cuda:1")

    def request():
        with torch.cuda.stream(side):  # block of cuda:0
            x * 2  # runs on cuda:1

    (noticed,) = watched(request).noticed
    assert (noticed.kind, noticed.lines) == ("mixed-devices", (line("runs on cuda:1"), line("block of cuda:0")))


@two_gpus
def test_blocks_of_each_device_are_fine(side):
    x = torch.zeros(SIZE, device="cuda:0")
    with torch.cuda.device(1):
        there = torch.cuda.Stream()

    def request():
        side.wait_stream(torch.cuda.current_stream(0))
        with torch.cuda.stream(side):
            y = x * 2
            z = y.to("cuda:1")
        there.wait_stream(torch.cuda.current_stream(1))
        with torch.cuda.stream(there):
            w = z * 2
        torch.cuda.current_stream(1).wait_stream(there)
        torch.cuda.current_stream(0).wait_stream(side)
        return w

    seen = watched(request)
    assert nothing(seen)
    assert {use.device for use in seen.streams} == {0, 1}


# 7. Whole programs, and the watcher itself.


def test_inference_of_a_plain_module(side):
    net, host = resnet18().eval().cuda(), torch.randn(2, 3, 64, 64)

    def request():
        return net(host.cuda()).argmax(1).cpu()

    seen = watched(request)
    assert nothing(seen)
    assert [use.handle for use in seen.streams if use.operators] == [0]


def test_a_step_of_training(side):
    net, host = resnet18(num_classes=10).cuda(), torch.randn(4, 3, 64, 64)
    optimizer = torch.optim.AdamW(net.parameters())

    def request():
        with torch.enable_grad():
            loss = nn.functional.cross_entropy(net(host.cuda()), torch.zeros(4, dtype=torch.long, device="cuda"))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    assert nothing(watched(request))


@pytest.mark.parametrize("exits", ["eager", *WAYS])
def test_runners(side, exits):
    net = network()
    x = clear_batches(net, [4])[0]
    options = WAYS.get(exits, {"exits": exits})
    with make_runner(net, x, batch_sizes=(4,), **options) as runner:
        for _ in range(2):
            runner(x)
        torch.cuda.synchronize()
        seen = watched(lambda: runner(x).label.tolist(), 3)
    assert nothing(seen)


def test_a_stream_that_torch_compile_keeps_is_not_of_the_program():
    double, x = torch.compile(lambda x: 2 * x, mode="reduce-overhead"), torch.zeros(8, device="cuda")
    with torch.no_grad():
        for _ in range(4):  # compiles, warms up, captures, replays
            double(x)
    kept = get_manager(0, create_if_none_exists=False).stream
    assert kept.cuda_stream not in {use.handle for use in watched(lambda: x + 1).streams}


def test_a_second_watcher_starts_afresh(side):
    a = torch.zeros(SIZE, device="cuda")

    def write():
        a.add_(1)

    def read():
        with torch.cuda.stream(side):
            a * 2

    first, second = watched(write), watched(read)
    assert nothing(first) and nothing(second)
    assert [use.handle for use in second.streams if use.operators] == [side.cuda_stream]


def test_nothing_is_printed_or_left_behind(side, capfd, caplog):
    own = {kind: dict(vars(kind)) for kind in (torch.cuda.Stream, torch.cuda.Event, torch.cuda.StreamContext)}
    a = torch.zeros(SIZE, device="cuda")

    def request():
        with torch.cuda.stream(side):
            a.add_(1)
        a.add_(2)

    with caplog.at_level(logging.INFO):
        seen = watched(request)
    assert len(seen.races) == 2
    request()
    assert len(seen.races) == 2 and capfd.readouterr() == ("", "")
    assert not [one for one in caplog.records if one.name.startswith("torch.cuda")]
    assert {kind: dict(vars(kind)) for kind in own} == own
