"""early_start.py on a GPU: launches that begin while those before them end read what was written, and no earlier."""

import pytest
import torch
from auxhead.kernels import attend, convolution, fused_conv2d

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU that can"
    ),
]

LAST = torch.channels_last
ROUNDS = 30
SIZES, SIZES_OF_ONE = [((1, 1), (1, 1), (1, 1))], [((1, 1), (0, 0), (1, 1))]


def map_of(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float16).contiguous(memory_format=LAST)


class Chain:
    """Layers, each of which reads what the last one left: a long one first, then ever shorter ones, many times over."""

    def __init__(self) -> None:
        self.wide = map_of(512, 512, 3, 3) / 68
        self.narrow = map_of(512, 512, 1, 1) / 23
        self.depthwise = map_of(512, 1, 3, 3) / 3
        self.x = map_of(2, 512, 14, 14)

    def __call__(self, beside: torch.cuda.Stream | None = None, begins_early: bool = True) -> list[torch.Tensor]:
        y, kept = self.x, []
        for _ in range(4):
            y = fused_conv2d(y, self.wide, None, *SIZES, 1, "relu", begins_early=begins_early)
            y = fused_conv2d(y, self.narrow, None, *SIZES_OF_ONE, 1, "", y, begins_early=begins_early)
            y = fused_conv2d(y, self.depthwise, None, *SIZES, 512, "silu", begins_early=begins_early)
            tokens = y.permute(0, 2, 3, 1).view(2, 14 * 14, 8, 64).transpose(1, 2)
            y = attend(tokens, tokens, tokens, begins_early=begins_early).transpose(1, 2).reshape(2, 14, 14, 512)
            y = y.permute(0, 3, 1, 2)
            if beside is not None:  # forks and joins, and a copy, which is no kernel
                beside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(beside):
                    kept.append(y.float().sum((2, 3)))
                y = fused_conv2d(y, self.narrow, None, *SIZES_OF_ONE, begins_early=begins_early)
                torch.cuda.current_stream().wait_stream(beside)
            y = y.clone(memory_format=torch.preserve_format)
        return [*kept, y]


@pytest.fixture
def chain():
    """A chain, and what it answers where each launch waits for the end of the one before."""
    torch.manual_seed(0)
    made, side = Chain(), torch.cuda.Stream()

    @torch.no_grad()
    def expected(with_side: bool) -> list[torch.Tensor]:
        return [each.clone() for each in made(side if with_side else None, begins_early=False)]

    return made, side, expected


def differences(chain, with_side: bool) -> int:
    """Replay a captured chain on ever new maps; count those that answer otherwise."""
    made, side, expected = chain
    expected(with_side)  # compiled
    found, beside, graph = 0, side if with_side else None, torch.cuda.CUDAGraph()
    with torch.no_grad():
        made(beside)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            answers = made(beside)
    for _ in range(ROUNDS):
        made.x.normal_()
        graph.replay()
        found += not all(map(torch.equal, answers, expected(with_side)))
    return found


@pytest.mark.parametrize("with_side", [False, True], ids=["a chain", "beside another stream"])
def test_graphs_answer_as_launches_one_by_one(chain, with_side: bool) -> None:
    assert differences(chain, with_side) == 0


def test_launches_of_a_stream_answer_as_one_by_one(chain) -> None:
    made, side, expected = chain
    for _ in range(ROUNDS):
        made.x.normal_()
        with torch.no_grad():
            (answer,) = made()
        assert torch.equal(answer, expected(False)[0])


def test_a_weight_written_just_before_is_read(chain) -> None:
    """A depthwise one that lies otherwise is copied by the launch before."""
    made, _, _ = chain
    for number in range(ROUNDS):
        with torch.no_grad():
            large = torch.full((512, 1, 3, 3), float(number), device="cuda", dtype=torch.float16)
            ones = torch.ones(1, 512, 3, 3, device="cuda", dtype=torch.float16).contiguous(memory_format=LAST)
            found = fused_conv2d(ones, large, large[:, 0, 0, 0].contiguous(), *SIZES, 512, begins_early=True)
        assert (found[:, :, 1, 1] == 10.0 * number).all()


def test_without_the_wait_they_read_too_early(chain, monkeypatch) -> None:
    """What the tests above look at can be seen."""
    triton = pytest.importorskip("triton")
    from auxhead.kernels.jit import convolution as jit

    @triton.jit
    def await_launch_before(EARLY_START: triton.language.constexpr):
        if EARLY_START:
            triton.language.extra.cuda.gdc_launch_dependents()

    monkeypatch.setattr(jit, "await_launch_before", await_launch_before)
    for name in ("convolution_kernel", "depthwise_kernel"):
        kernel = getattr(jit, name)
        monkeypatch.setattr(jit, name, triton.jit(kernel.fn, do_not_specialize=kernel.do_not_specialize))
    assert convolution.kernel is jit and differences(chain, False) > 0
