"""arrival_counters.py: zeroed counters are shared on a stream and in a capture, and by nothing else."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from auxhead.kernels import fused_head
from auxhead.kernels.launch.arrival_counters import ArrivalCounters


def test_counters_grow_and_are_shared_on_a_stream(device):
    counters = ArrivalCounters(device)
    small = counters.take(3)
    assert (small.numel(), small.dtype, small.device) == (3, torch.int32, device)
    assert counters.take(1).data_ptr() == small.data_ptr()
    large = counters.take(5000)
    assert large.numel() == 5000 and not large.any()
    assert counters.take(1).data_ptr() == large.data_ptr()


def test_counters_of_captures_are_their_own_and_aligned(device):
    """No two captures share a counter, nor two streams of one.

    Each block starts at a cache line, so that no two share one, and lies in it as those of other captures do. Triton
    would also compile a kernel anew for a pointer that is no multiple of 16, and a capture is no place to compile.
    """
    counters = ArrivalCounters(device)
    counters._reserve = torch.zeros(1 << 12, dtype=torch.int32, device=device)
    start, seen, blocks = counters._reserve.data_ptr(), set(), {}
    for stream, capture, count in ((1, 1, 1), (1, 2, 1), (1, 3, 3), (2, 3, 5), (1, 4, 2), (2, 4, 100), (3, 4, 1)):
        block = blocks[stream, capture] = counters._take_for_capture(count, stream, capture)
        places = set(range(block.data_ptr(), block.data_ptr() + 4 * count, 4))
        assert block.numel() >= count and not places & seen
        assert (block.data_ptr() - start) % 128 == 0, f"block of {count} at {block.data_ptr() - start} bytes"
        seen |= places
    assert counters._take_for_capture(30, 2, 4).data_ptr() == blocks[2, 4].data_ptr()
    large = counters._take_for_capture(200, 2, 4)
    assert not set(range(large.data_ptr(), large.data_ptr() + 800, 4)) & seen
    assert counters._take_for_capture(100, 2, 4).data_ptr() == large.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_reserve_that_is_used_up_stays_with_the_graphs():
    """Graphs hold addresses: no later reserve may have them."""
    device = torch.device("cuda", torch.cuda.current_device())
    counters, taken = ArrivalCounters(device), []
    for capture in range(6):
        counters.take(1)  # makes a new reserve where half of one is gone
        block = counters._take_for_capture(3 << 19, stream=1, capture=capture)
        taken.append((block.data_ptr(), block.data_ptr() + block.nbytes))
        del block
    taken.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_reserve_is_zero_before_any_stream_can_read_it():
    device = torch.device("cuda", torch.cuda.current_device())
    counters, other = ArrivalCounters(device), torch.cuda.Stream()
    counters._zeros(1 << 22).fill_(1)  # is freed: the reserve's memory
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # some 10 ms
    counters.take(1)
    with torch.cuda.stream(other):
        assert not counters._take_for_capture(1 << 20, stream=1, capture=1).any()


class Stream:
    """A stream of PyTorch's, or one that somebody else has made."""

    def __init__(self, handle: int, number: int, *, of_pytorch: bool) -> None:
        self.cuda_stream, self.number = handle, number
        self.stream_id = 35 if of_pytorch else handle
        self.waits: list[object] = []
        self.is_busy = False

    def wait_event(self, event: object) -> None:
        self.waits.append(event)

    def synchronize(self) -> None:
        pass


class Event:
    stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return not self.stream.is_busy


@pytest.fixture
def on(monkeypatch):
    """Makes a stream the current one of a device that does not exist."""
    module, streams = sys.modules[ArrivalCounters.__module__], []
    monkeypatch.setattr(module, "is_capturing", lambda _device: False)
    monkeypatch.setattr(module, "beside_captures", nullcontext)
    monkeypatch.setattr(module, "stream_number", lambda _handle: streams[-1].number)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: streams[-1])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(ArrivalCounters, "_zeros", lambda _self, count: torch.zeros(count, dtype=torch.int32))
    return streams.append


class Reserve:
    """Places of counters, which take a while to be handed out."""

    def __init__(self, places):
        self.places = places

    def numel(self):
        return len(self.places)

    def __getitem__(self, part):
        time.sleep(0.01)
        return Reserve(self.places[part])


def test_captures_of_two_threads_share_no_counters(on, monkeypatch):
    module, ids = sys.modules[ArrivalCounters.__module__], iter(range(100))
    monkeypatch.setattr(module, "is_capturing", lambda _device: True)
    monkeypatch.setattr(module, "capture_id", lambda _handle: next(ids))
    on(Stream(7, 7, of_pytorch=True))
    counters = ArrivalCounters(torch.device("cuda", 0))
    counters._reserve = Reserve(range(256))
    with ThreadPoolExecutor(4) as pool:
        taken = [one.places for one in pool.map(lambda _: counters.take(8), range(4))]
    assert len({place for places in taken for place in places}) == 4 * 8


def test_streams_share_no_counters(on):
    counters = ArrivalCounters(torch.device("cuda", 0))
    streams, found = [Stream(handle, handle, of_pytorch=True) for handle in (11, 22, 0)], []
    for stream, count in zip(2 * streams, (3, 3, 3, 5, 1, 3), strict=True):
        on(stream)
        found.append(counters.take(count).data_ptr())
    assert len({*found[:3]}) == 3 and found[3:] == found[:3]


def test_a_reserve_whose_clearing_nobody_has_waited_for_is_not_handed_out(on):
    counters, stream = ArrivalCounters(torch.device("cuda", 0)), Stream(0, 0, of_pytorch=True)
    stream.synchronize = Mock(side_effect=[KeyboardInterrupt, None])
    on(stream)
    with pytest.raises(KeyboardInterrupt):
        counters.take(8)
    assert counters._reserve.numel() == 0
    counters.take(8)
    assert counters._reserve.numel() > 0


@pytest.mark.parametrize("of_pytorch", [False, True], ids=["others'", "PyTorch's"])
def test_a_stream_waits_for_a_destroyed_one_that_had_its_handle(on, of_pytorch):
    """PyTorch makes its streams when somebody asks for the first one, and may get such a handle, too."""
    counters, first = ArrivalCounters(torch.device("cuda", 0)), Stream(0x1000, 1, of_pytorch=False)
    second, third = (Stream(0x1000, number, of_pytorch=of_pytorch) for number in (2, 2))
    for stream in (first, first, second, third):
        on(stream)
        taken = counters.take(8).data_ptr()
        counters.launched()
    assert counters.take(8).data_ptr() == taken
    (event,) = second.waits
    assert event.stream is first and not first.waits and not third.waits


def test_streams_that_come_and_go_take_over_the_counters_of_idle_ones(on):
    counters = ArrivalCounters(torch.device("cuda", 0))
    streams = [Stream(0x1000 + 16 * number, number, of_pytorch=False) for number in range(800)]
    for stream in streams:
        on(stream)
        taken = counters.take(8).data_ptr()
        counters.launched()
    assert len(counters._by_stream) == len(counters._foreign) == 1 and not counters._kept[1:]
    on(streams[3])
    assert counters.take(8).data_ptr() == taken, "one that is still there is as good as a new one"


def test_counters_that_are_in_use_are_not_taken_over(on):
    counters, taken = ArrivalCounters(torch.device("cuda", 0)), []
    busy, launching, idle, new, other = (Stream(0x1000 * number, number, of_pytorch=False) for number in range(1, 6))
    busy.is_busy = True
    for stream in (busy, idle, launching):
        on(stream)
        taken.append(counters.take(8).data_ptr())
        counters.launched()
        if stream is busy:
            counters.take(100_000)  # of a stream that others' memory may be part of
            counters.launched()
    assert len({*taken}) == 2, "the third stream takes over the second's"
    counters.take(8)  # by a thread that has not launched yet
    for stream in (new, other):
        on(stream)
        taken.append(counters.take(8).data_ptr())
    assert len({*taken}) == 4
    assert counters.take(200_000).data_ptr() not in taken and len(counters._kept) == 3, "the reserve, and two grown"


def test_a_stream_of_pytorch_that_is_wrapped_keeps_its_counters(on):
    """Plans launch with them, and tell nobody."""
    counters = ArrivalCounters(torch.device("cuda", 0))
    on(Stream(0x1000, 1, of_pytorch=True))
    kept = counters.take(8).data_ptr()
    for handle, is_kept in ((0x1000, True), (0x2000, False)):
        on(Stream(handle, 1, of_pytorch=False))
        assert (counters.take(8).data_ptr() == kept) == counters.are_kept(handle) == is_kept
        counters.launched()


def test_counters_are_allocated_beside_captures_of_other_threads(monkeypatch):
    """Else CUDA refuses that, and breaks their captures."""
    module, beside, made = sys.modules[ArrivalCounters.__module__], [], []

    @contextmanager
    def relaxed():
        beside.append(None)
        yield
        beside.pop()

    def zeros(count, **_):
        made.append(len(beside))
        return torch.ones(count, dtype=torch.int32) * 0

    monkeypatch.setattr(module, "is_capturing", lambda _device: False)
    monkeypatch.setattr(module, "beside_captures", relaxed)
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream(0, 1, of_pytorch=True))
    ArrivalCounters(torch.device("cuda", 0)).take(8)
    assert made == [1, 1], "the stream's, and a reserve"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_first_head_on_a_stream_leaves_another_threads_capture_alone():
    x, weight = torch.randn(8, 64, 7, 7, device="cuda"), torch.randn(10, 64, device="cuda")
    wanted, stream = fused_head(x, weight), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kept = torch.empty(1, device="cuda")  # PyTorch then has memory for the answer
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        captured = fused_head(x, weight)

        def in_another_thread():
            torch.cuda.set_device(x.device)
            with torch.cuda.stream(stream):
                return fused_head(x, weight)

        found = pool.submit(in_another_thread).result()
    graph.replay()
    torch.cuda.synchronize()
    assert kept.numel() and torch.equal(captured.probs, wanted.probs) and torch.equal(found.probs, wanted.probs)
