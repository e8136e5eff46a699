"""exit_launch.py, fuzzed: one to three heads of any shape and layout in one launch, merged as a plain loop does."""

import math

import pytest
import torch
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch, HeadOutput
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from support.head_cases import bits
from support.head_fuzz import Bounds, Case, Inputs, cases, check_answer, exact

pytestmark = pytest.mark.usefixtures("poisoned_empty", "tiles_from_7")

SMALL = Bounds((3, 1, 7), 4, 4, 2, (3, 1, 10), 100, 1000)
LARGE = Bounds((1, 3, 8, 17, 32), 200, 20, 4, (1, 10, 130, 1000), 50_000, 1_000_000)


@st.composite
def networks(draw, bounds: Bounds) -> tuple[list[Case], int]:
    """Heads for one batch, of one dtype and number of classes, and how many samples are no padding."""
    one = bounds._replace(
        samples=(draw(st.sampled_from(bounds.samples)),), classes=(draw(st.sampled_from(bounds.classes)),)
    )
    heads = draw(st.lists(cases(one), min_size=1, max_size=3))
    samples, classes = (min(sizes) for sizes in zip(*((case.shape[0], case.classes) for case in heads), strict=True))
    dtype = heads[0].dtype
    heads = [
        case._replace(shape=(samples, *case.shape[1:]), classes=classes, dtype=dtype, tensors=(True, True))
        for case in heads
    ]
    return heads, draw(st.integers(1, samples))


def run_networks(bounds: Bounds, part: int, count: int, device: torch.device) -> None:
    @seed(part)
    @settings(max_examples=count, deadline=None, database=None)
    @given(networks(bounds))
    def check(network):
        heads, valid = network
        samples, classes = heads[0].shape[0], heads[0].classes
        inputs = [Inputs.of(case, device) for case in heads]
        before = [own.copies() for own in inputs]
        buffers = ExitBuffers.allocate(len(heads), samples, classes, with_probs=True, device=device)
        buffers.valid.fill_(valid)
        launch = ExitLaunch(buffers, 0, [_head(case, own) for case, own in zip(heads, inputs, strict=True)])
        answers = []
        for _ in range(2):
            for buffer in (buffers.confidence, buffers.probs):
                buffer.fill_(math.nan)
            buffers.label.fill_(-1)
            buffers.packed_answer.fill_(255)
            launch([own.x for own in inputs])
            answers.append([buffers.packed_answer.clone(), buffers.confidence.clone(), buffers.probs.clone()])
        for one, other in zip(*answers, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), "not the same bits again"
        for place, (case, own) in enumerate(zip(heads, inputs, strict=True)):
            said = HeadOutput(
                *(one[place] for one in (buffers.probs, buffers.label, buffers.confidence, buffers.exits))
            )
            check_answer(case, own, said, exact(case, own), by_blas=device.type == "cpu")
            own.assert_unchanged(before[place])
        _check_merged(buffers, valid)

    check()


def _head(case: Case, inputs: Inputs) -> ExitHead:
    device = inputs.x.device
    rule = (torch.tensor([value], device=device) for value in (case.temperature, case.threshold))
    return ExitHead(inputs.weight, inputs.bias, *rule, case.pool, case.pool_size)


def _check_merged(buffers: ExitBuffers, valid: int) -> None:
    """The first place that is sure answers for a sample, else the last one."""
    last = len(buffers.exits) - 1
    label, exit_index, confidence, probs = buffers.answer(buffers.packed_answer)
    for sample in range(valid):
        place = next((place for place in range(last) if buffers.exits[place, sample]), last)
        assert exit_index[sample] == place and label[sample] == buffers.label[place, sample]
        assert torch.equal(bits(confidence[sample : sample + 1]), bits(buffers.confidence[place, sample : sample + 1]))
        assert torch.equal(bits(probs[sample]), bits(buffers.probs[place, sample]))


def test_small_networks():
    run_networks(SMALL, 0, 5, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("part", range(4))
def test_80_networks(part):
    bounds = LARGE._replace(classes=LARGE.classes[part % 2 :: 2])
    run_networks(bounds, part, 20, torch.device("cuda", torch.cuda.current_device()))
