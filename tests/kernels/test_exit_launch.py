"""exit_launch.py: several heads in one launch, merged per sample with the answers of earlier launches."""

import math
from itertools import product

import pytest
import torch
from auxhead.kernels import ExitBuffers, ExitHead, ExitLaunch, HeadOutput, decide, fused_head
from auxhead.kernels.reference.criteria import CRITERIA
from auxhead.kernels.reference.merge import in_order
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from support.head_cases import bits
from support.head_fuzz import Bounds, Case, Inputs, cases, check_answer, exact

#: Tiles as soon as there are 7 samples; what each head says is compared with the reference, not interpreted as well.
pytestmark = pytest.mark.usefixtures("tiles_from_7", "without_interpreter", "poisoned_empty")

CLASSES = {"few": 10, "many": 130, "several softmax steps": 1500}


def make_heads(samples, classes, device):
    """Heads of three pools and layouts, with what their taps return; thresholds let about half of the samples go."""
    inputs = [
        torch.randn(samples, 8, 6, 6, device=device),
        torch.randn(samples, 12, 5, 5, device=device).to(memory_format=torch.channels_last),
        torch.randn(samples, 7, 16, device=device),
    ]
    heads = []
    for x, pool, size in zip(inputs, ("avg", "max", "first"), (2, 1, 1), strict=True):
        width = x.shape[1] * size * size if x.ndim == 4 else x.shape[2]
        weight, bias = torch.randn(classes, width, device=device), torch.randn(classes, device=device)
        heat, limit = torch.full((), 1.5, device=device), torch.ones((), device=device)
        head = ExitHead(weight, bias, heat, limit, pool, (size, size))
        ordered = spoken(head, x).confidence.sort().values
        head.threshold.copy_(ordered[(samples - 1) // 2 : (samples + 3) // 2].mean() - (samples == 1) * 1e-3)
        heads.append(head)
    return heads, inputs


def spoken(head: ExitHead, x: torch.Tensor) -> HeadOutput:
    return fused_head(
        x, head.weight, head.bias, pool=head.pool, pool_size=head.pool_size,
        temperature=head.temperature, threshold=head.threshold,
    )  # fmt: skip


def expected_exits(outputs: list[HeadOutput], valid: int) -> list[int]:
    """The first sure place of each valid sample, else the last, one by one."""
    return [
        next((place for place, output in enumerate(outputs) if output.exit[n]), len(outputs) - 1) for n in range(valid)
    ]


#: How three heads and a classifier share launches: the last place of each.
SHARES = {
    "a launch each": (0, 1, 2, 3),
    "two and two": (1, 3),
    "three, then the classifier": (2, 3),
    "one launch for all": (3,),
}


#: On the CPU: classes, samples, valid ones, share, logits given. Everything once, tiled (from 7 samples on) and split.
INTERPRETED = {
    *(("few", 1, 1, share, True) for share in SHARES),
    *(("few", 5, 2, share, False) for share in SHARES),
    ("few", 5, 5, "two and two", True),
    ("many", 5, 5, "one launch for all", False),
    ("several softmax steps", 1, 1, "two and two", False),
    ("several softmax steps", 5, 2, "one launch for all", True),
    ("few", 18, 17, "two and two", False),
    ("many", 18, 17, "one launch for all", True),
}


SIZES = ((1, 1), (5, 5), (5, 2), (18, 17), (33, 16))
#: On a GPU all of them.
COMPILED = [(one, *size, share, given) for one, size, share, given in product(CLASSES, SIZES, SHARES, (True, False))]


@pytest.mark.parametrize(
    "classes, samples, valid, share, logits_given", COMPILED if torch.cuda.is_available() else sorted(INTERPRETED)
)
def test_merged_answers(device, share, classes, samples, valid, logits_given):
    classes = CLASSES[classes]
    heads, inputs = make_heads(samples, classes, device)
    if logits_given:
        last, final = None, torch.randn(samples, classes, device=device)
        final_output = decide(final, 1.0, 1.0)
    else:
        last = ExitHead(
            torch.randn(classes, 9, device=device), None, torch.ones((), device=device), torch.ones((), device=device),
            "avg", (1, 1),
        )  # fmt: skip
        final = torch.randn(samples, 9, 3, 3, device=device)
        final_output = spoken(last, final)
    outputs = [*(spoken(head, x) for head, x in zip(heads, inputs, strict=True)), final_output]
    buffers = ExitBuffers.allocate(4, samples, classes, with_probs=True, device=device)
    buffers.valid.fill_(valid)
    places, xs = [*heads, last], [*inputs, final]
    launches, start = [], 0
    for end in SHARES[share]:
        launches.append((ExitLaunch(buffers, start, places[start : end + 1]), xs[start : end + 1]))
        start = end + 1
    wanted = expected_exits(outputs, valid)
    for _ in range(repeats(device, samples)):
        buffers.packed_answer.fill_(255)
        for launch, some in launches:
            launch(some)
            assert_counters_are_zero(launch, tiled={samples >= 7} if classes <= 128 else {True, False})
        label, exit_index, confidence, probs = buffers.answer(buffers.packed_answer)
        assert exit_index[:valid].tolist() == wanted
        for n, place in enumerate(wanted):
            assert label[n] == outputs[place].label[n]
            torch.testing.assert_close(confidence[n], outputs[place].confidence[n])
            torch.testing.assert_close(probs[n], outputs[place].probs[n])
        for place, output in enumerate(outputs):  # what each exit says is there, too
            torch.testing.assert_close(buffers.probs[place], output.probs)
            assert torch.equal(buffers.label[place], output.label)
    assert len(set(wanted)) > 1 or valid < 5


def repeats(device, samples):
    """The interpreter repeats small launches only; that counters are zero after one shows in the others, too."""
    return 2 if device.type == "cuda" or samples < 4 else 1


def assert_counters_are_zero(launch, *, tiled):
    assert not any(counters.any() for counters in launch._counters)
    for space in launch._spaces.values():
        assert (
            space.constants.tiled in tiled or space.constants.element_size == 4
        )  # never by rule: tiles of half precision
        zeros = [part for part in space.arguments.workspace if part is not None and part.dtype == torch.int32]
        assert zeros and not any(part.any() for part in zeros), "what programs left for each other is taken and cleared"


@pytest.mark.parametrize("samples, valid", [(1, 1), (6, 6), (6, 3), (20, 19)])
def test_open_samples_are_published(device, samples, valid):
    heads, inputs = make_heads(samples, 20, device)
    published = torch.full((3,), -1, dtype=torch.int64)
    if device.type == "cuda":
        published = published.pin_memory()
    buffers = ExitBuffers.allocate(4, samples, 20, with_probs=False, device=device)
    buffers.valid.fill_(valid)
    launches = [
        ExitLaunch(buffers, place, [head], open_samples=published[place : place + 1])
        for place, head in enumerate(heads)
    ]
    exits = torch.stack([spoken(head, x).exit for head, x in zip(heads, inputs, strict=True)]).cpu()
    for request in range(1, repeats(device, samples) + 1):
        published.fill_(-1)
        for launch, x in zip(launches, inputs, strict=True):
            launch([x])
            assert_counters_are_zero(launch, tiled={samples >= 7})
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert [number >> 32 for number in published.tolist()] == [request] * 3
        still_open = [number & 0xFFFFFFFF for number in published.tolist()]
        assert still_open == [valid - int(exits[: place + 1, :valid].any(0).sum()) for place in range(3)]


def test_only_the_last_place_takes_logits(device):
    buffers = ExitBuffers.allocate(3, 2, 4, with_probs=True, device=device)
    with pytest.raises(ValueError, match="last place"):
        ExitLaunch(buffers, 0, [None])


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("samples, classes", [(1, 130), (5, 10)])
def test_heads_of_logits_have_rules(device, samples, classes, criterion):
    """Heads that are modules of their own, before and after a fused one: a launch is given their logits."""
    heads, inputs = make_heads(samples, classes, device)
    for place, dtype in ((0, torch.float32), (2, torch.float16)):
        inputs[place] = torch.randn(samples, 2 * classes, device=device).to(dtype)[:, ::2]
        rule = torch.full((1,), 0.7, device=device), torch.zeros(1, device=device)
        heads[place] = ExitHead(None, None, *rule, "none", (1, 1), criterion)
        ordered = decide(inputs[place].float(), rule[0], 1.0, criterion).confidence.sort().values
        rule[1].copy_(ordered[(samples - 1) // 2 : (samples + 3) // 2].mean() - (samples == 1) * 1e-3)
    final = torch.randn(samples, classes, device=device)
    buffers = ExitBuffers.allocate(4, samples, classes, with_probs=True, device=device)
    ExitLaunch(buffers, 0, [*heads, None])([*inputs, final])
    outputs = [
        decide(inputs[0], heads[0].temperature, heads[0].threshold, criterion),
        spoken(heads[1], inputs[1]),
        decide(inputs[2].float(), heads[2].temperature, heads[2].threshold, criterion),
        decide(final, 1.0, 1.0),
    ]
    for place, output in enumerate(outputs):
        torch.testing.assert_close(buffers.probs[place], output.probs)
        torch.testing.assert_close(buffers.confidence[place], output.confidence)
        assert torch.equal(buffers.label[place], output.label)
        assert place == 3 or torch.equal(buffers.exits[place], output.exit)
    if criterion == "patience":  # which is told where answers are merged, from all heads so far
        outputs[2] = in_order(outputs[:3], heads[2].threshold, criterion)
    exit_index = buffers.answer(buffers.packed_answer)[1]
    assert exit_index.tolist() == expected_exits(outputs, samples)


@pytest.mark.parametrize("criterion", ["patience", "max_prob"])
def test_the_last_place_answers_whoever_is_not_sure_whatever_its_rule(device, criterion):
    """A classifier that has a rule, too, as a head has; see reference/merge.py."""
    heads, inputs = make_heads(3, 4, device)
    heads = [head._replace(criterion=criterion, threshold=torch.full((1,), 5.0, device=device)) for head in heads]
    buffers = ExitBuffers.allocate(len(heads), 3, 4, with_probs=True, device=device)
    ExitLaunch(buffers, 0, heads)(inputs)
    label, exit_index, _, probs = buffers.answer(buffers.packed_answer)
    assert exit_index.tolist() == [len(heads) - 1] * 3
    assert torch.equal(label, buffers.label[-1]) and torch.equal(probs, buffers.probs[-1])


# Fuzzed: one to three heads of any shape and layout in one launch

SMALL_NETWORKS = Bounds((3, 1, 7), 4, 4, 2, (3, 1, 10), 100, 1000)
LARGE_NETWORKS = Bounds((1, 3, 8, 17, 32), 200, 20, 4, (1, 10, 130, 1000), 50_000, 1_000_000)


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
    run_networks(SMALL_NETWORKS, 0, 5, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(4 * torch.cuda.is_available()))
def test_80_networks(part):
    bounds = LARGE_NETWORKS._replace(classes=LARGE_NETWORKS.classes[part % 2 :: 2])
    run_networks(bounds, part, 20, torch.device("cuda", torch.cuda.current_device()))
