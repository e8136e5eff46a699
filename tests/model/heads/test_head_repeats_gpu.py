"""repeats.py on a GPU: compiled launches that are repeated by address, on any stream, thread and in captures."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from auxhead.kernels.launch.choose_config import overriding
from auxhead.kernels.launch.head_shape import HeadShape
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.launch.launch_rule import config_by_rule
from auxhead.model.heads.driver_launch import DriverLaunch
from cuda.bindings import runtime
from support.example_models import needs_gpu
from support.gpu_work import new_stream, work_on_the_gpu
from support.graph_runner_cases import hold_up, spoil
from support.head_cases import DTYPES, assert_same_bits
from support.head_cases import make_input as noise
from support.head_plan_cases import (
    counting,
    follows,
    head_for,
    make_head,
    make_input,
)

pytestmark = needs_gpu

#: One of each way to launch: split, in tiles, in tiles of groups of samples; and odd ones.
SHAPES = [
    ((1, 1, 1, 1), 2), ((1, 512, 7, 7), 10), ((2, 512, 7, 7), 1000), ((5, 63, 13, 11), 3), ((64, 512, 2, 2), 1000),
    ((9, 197, 192), 12),
]  # fmt: skip


@pytest.mark.parametrize("temperature", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_temperature_that_nobody_has_checked(temperature: float) -> None:
    head = make_head("cuda")
    x = make_input(head)
    follows(head, x)
    head.rule.temperature_tensor.fill_(temperature)
    follows(head, x)
    assert head(x).confidence.isnan().all() and not head(x).exit.any()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_inputs_of_any_alignment(dtype: torch.dtype, packs: bool, request: pytest.FixtureRequest) -> None:
    """A kernel that was compiled for aligned memory may not read from elsewhere."""
    if packs:
        request.getfixturevalue("packs_features")
    head = make_head("cuda", dtype)
    x = make_input(head, (4, 2, 4, 4))
    memory = torch.empty(x.numel() + 16, device="cuda", dtype=dtype)
    for _ in range(2):
        for offset in range(16):
            there = memory[offset : offset + x.numel()].view(x.shape)
            there.copy_(torch.randn_like(x))
            follows(head, there)


def test_a_weight_whose_memory_was_given_back() -> None:
    """Its address may be that of something else by now."""
    head = make_head("cuda")
    x = make_input(head)
    for _ in range(20):
        follows(head, x)
        head.linear.weight.data = torch.randn_like(head.linear.weight) * 3
        spoil()
    follows(head, x)
    head.cpu()
    spoil()
    follows(head, x.cpu())
    head.cuda()
    follows(head, x)


def test_an_overriding_configuration_is_launched() -> None:
    """A plan that was made without one says nothing then, and one that was made with it nothing later."""
    head = head_for("cuda", (1, 512, 7, 7), 10, rule=0.3)
    x = noise((1, 512, 7, 7), device="cuda")
    view = head_view(x.shape, x.stride(), "avg", (1, 1))
    shape = HeadShape.of(view, 10, pool_max=False, dtype=x.dtype)
    config = config_by_rule(shape)
    with torch.no_grad():
        head(x)
        for _ in range(2):
            with overriding({shape: config}), counting(head) as calls:
                assert_same_bits(head(x), head._call(x))
            assert len(calls) == 2
            follows(head, x)


def test_a_repeated_call_is_one_kernel(tmp_path) -> None:
    head = make_head("cuda")
    x = make_input(head)
    with torch.no_grad():
        head(x)
        assert work_on_the_gpu(lambda: head(x), tmp_path) == ["exit_kernel"]


@pytest.mark.usefixtures("packs_features")
def test_a_repeated_call_of_a_head_whose_features_are_packed_is_two_kernels(tmp_path) -> None:
    head = make_head("cuda")
    x = make_input(head)
    with torch.no_grad():
        head(x)
        assert work_on_the_gpu(lambda: head(x), tmp_path) == ["pack_kernel", "exit_kernel"]


# Streams, threads and captures


@pytest.mark.parametrize("make", [torch.cuda.Stream, new_stream], ids=["PyTorch's", "external"])
def test_streams_at_once(make: Callable[[], torch.cuda.Stream]) -> None:
    """Held up, so that launches on several streams are under way together; none may use another's workspace."""
    shape = (8, 512, 7, 7)
    head = head_for("cuda", shape, 10, dtype=torch.float16, rule=0.3)
    streams = [torch.cuda.default_stream(), make(), make()]
    batches = [noise(shape, dtype=torch.float16, device="cuda", seed=seed) for seed in range(3)]
    with torch.no_grad():
        wanted = [head._call(x) for x in batches]
        torch.cuda.synchronize()
        for _ in range(4):
            found = []
            for stream in streams:
                hold_up(stream)
            for _ in range(10):
                for stream, x in zip(streams, batches, strict=True):
                    with torch.cuda.stream(stream):
                        found.append(head(x))
            torch.cuda.synchronize()
            for index, one in enumerate(found):
                assert_same_bits(one, wanted[index % 3])


def test_a_stream_made_anew_is_not_taken_for_the_one_before() -> None:
    head = head_for("cuda", (8, 512, 7, 7), 10, dtype=torch.float16, rule=0.3)
    x = noise((8, 512, 7, 7), dtype=torch.float16, device="cuda")
    with torch.no_grad():
        wanted = head._call(x)
        for _ in range(20):
            stream = new_stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                hold_up(stream, 2_000_000)
                found = [head(x) for _ in range(3)]
            runtime.cudaStreamDestroy(stream.cuda_stream)
            again = new_stream()
            with torch.cuda.stream(again):
                found += [head(x) for _ in range(3)]
            torch.cuda.synchronize()
            runtime.cudaStreamDestroy(again.cuda_stream)
            for one in found:
                assert_same_bits(one, wanted)


def test_rules_that_were_assigned_on_another_stream() -> None:
    head = make_head("cuda")
    x = make_input(head)
    asks, assigns = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.no_grad():
        for turn in range(6):
            torch.cuda.synchronize()
            hold_up(assigns)
            with torch.cuda.stream(assigns):
                head.rule.threshold = float(turn % 2)
            with torch.cuda.stream(asks):
                answer = head(x)
            torch.cuda.synchronize()
            assert answer.exit.any().item() == (turn % 2 == 0)


@pytest.mark.parametrize("own_streams", [True, False], ids=["own streams", "one stream"])
def test_threads_call_one_head_at_once(own_streams: bool) -> None:
    head = make_head("cuda")
    batches = [make_input(head, (1 + index, 2, 4, 4)) for index in range(24)]
    with torch.no_grad():
        wanted = [head._call(x) for x in batches]
    torch.cuda.synchronize()

    def work(thread: int) -> None:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.default_stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            found = [(index % 24, head(batches[index % 24])) for index in range(thread, 600, 2 * thread + 1)]
            stream.synchronize()
            for index, one in found:
                assert_same_bits(one, wanted[index])

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, thread) for thread in range(4)]:
            done.result()


def test_captures_between_repeated_calls() -> None:
    """A capture's launch has counters of its own, and its graph reads what the head has then."""
    head = make_head("cuda")
    batches = [make_input(head) for _ in range(3)]
    static, stream = batches[0].clone(), torch.cuda.Stream()
    with torch.no_grad():
        wanted = [head._call(x) for x in batches]
        with torch.cuda.stream(stream):
            for _ in range(3):
                head(static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = [head(static), head(static)]
        for x, right in zip(batches, wanted, strict=True):
            static.copy_(x)
            with torch.cuda.stream(stream):
                beside = head(batches[1])
            graph.replay()
            torch.cuda.synchronize()
            assert_same_bits(beside, wanted[1])
            for one in captured:
                assert_same_bits(one, right)


def test_answers_are_memory_of_the_stream_that_asked() -> None:
    """Given back, it is written by the next launch; nothing else that is under way may read or write it."""
    head = make_head("cuda")
    x, late = make_input(head), torch.empty((3, 2, 4, 5), device="cuda")
    with torch.no_grad():
        wanted = head._call(x)
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream(), new_stream()):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(10):
                    hold_up(stream, 1_000_000)
                    late.copy_(x)
                    answer = head(late)
                    late.fill_(float("nan"))
                    kept = [part.clone() for part in answer]
                    del answer
                    spoil()
                    stream.synchronize()
                    assert_same_bits(type(wanted)(*kept), wanted)


# The driver's launches


@contextmanager
def driver_launches() -> Iterator[list[bool]]:
    """While open, the list that is returned says of each launch by the driver whether it was made."""
    made: list[bool] = []
    launch = DriverLaunch.__call__

    def counted(self: DriverLaunch, *given: object) -> bool:
        made.append(launch(self, *given))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DriverLaunch, "__call__", counted)
        yield made


@pytest.mark.parametrize("shape, classes", SHAPES)
@torch.no_grad()
def test_launches_are_repeated_by_the_driver(shape: tuple[int, ...], classes: int) -> None:
    head = head_for("cuda", shape, classes)
    x = noise(shape, device="cuda", seed=1)
    wanted = head(x)
    with driver_launches() as made:
        assert_same_bits(head(x), wanted)
    assert made in ([True], [True, True]), "a launch may pack before"


@torch.no_grad()
def test_a_threads_first_launch() -> None:
    """A new thread has no context of CUDA's until somebody makes it one, which no allocation from kept memory does."""
    head = make_head(device="cuda")
    x = make_input(head)
    follows(head, x)
    wanted = head(x)
    with driver_launches() as made, ThreadPoolExecutor(1) as pool:
        found = [pool.submit(torch.no_grad()(head), x).result() for _ in range(2)]
    assert made[-1] and len(made) == 2
    for answer in found:
        assert_same_bits(answer, wanted)
