"""jit/slices.py: of many classes tiles find out about their own, and several programs write what a sample gets."""

import importlib
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from auxhead.kernels import CRITERIA, ExitBuffers, ExitHead, ExitLaunch, LaunchConfig, fused_head, merge
from auxhead.kernels.launch.head_view import head_view
from auxhead.kernels.reference.fused_head import decide, fused_head_reference
from auxhead.kernels.reference.merge import in_order
from hypothesis import given, settings
from hypothesis import strategies as st
from support.head_cases import (
    DTYPES,
    assert_output_form,
    assert_same_bits,
    check_head,
    feature_count,
    head_logits,
    launched_as,
    make_head,
    make_linear,
    taken_counters,
)
from support.hidden_layer_cases import check, make
from support.tolerance import assert_as_accurate_as_pytorch

pytestmark = pytest.mark.usefixtures("poisoned_empty")

NAN, INF = float("nan"), float("inf")
#: Slices of 16 classes; a program writes 32 probabilities of a sample.
IN_PLACE = LaunchConfig(8, 16, 1, 1, 16, 16, 1, 32, 1, 1, 4, weight_buffers=2, features="in place")
PACKED = replace(IN_PLACE, block_c=8, block_p=2, block_a=2, features="packed")
#: Classes: one more than a program writes; as many slices as a power of two; a last slice of one class.
CLASSES = (33, 64, 81)


def sliced(config, x, classes, pool="none", pool_size=(1, 1)):
    """Launch a head as given, which is in slices."""
    assert config.surveys_of(classes)
    return launched_as(config, x, classes, pool, pool_size)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_confidence_is_the_formula(criterion, dtype, device):
    """For more samples than a tile has, and with what each criterion finds in a slice put together."""
    for classes, temperature in zip(CLASSES, (0.3, 1.0, 2.5), strict=True):
        x, weight, bias = make_head((9, 20), classes, dtype=dtype, device=device)
        options = {"criterion": criterion, "temperature": temperature, "threshold": 0.25}
        with sliced(IN_PLACE, x, classes), taken_counters() as taken:
            out = fused_head(x, weight, bias, **options)
            assert_same_bits(out, fused_head(x, weight, bias, **options))
            without = fused_head(x, weight, bias, return_probs=False, **options)
        assert not any(counters.any() for counters in taken)
        assert {counters.numel() for counters in taken} == {9 + 1}, "a counter for each sample, and of tickets"
        assert without.probs is None
        assert_same_bits(out._replace(probs=None), without)
        assert_output_form(out, 9, classes, device)
        exact = fused_head_reference(
                x.double(), weight.double(), bias.double(), pool="avg", pool_size=(1, 1), **options
            )  # fmt: skip
        pytorch = decide(head_logits(x, weight, bias).float(), temperature, 0.25, criterion)
        logits = head_logits(x.double(), weight.double(), bias.double())
        magnitude = logits.abs().max().item() / min(1.0, temperature)
        for name in ("probs", "confidence"):
            said, right, theirs = (getattr(one, name) for one in (out, exact, pytorch))
            scale = magnitude / (1.0 if name == "probs" else max(right.abs().max().item(), 1e-3))
            assert_as_accurate_as_pytorch(said, right, theirs, magnitude=scale, what=f"{criterion}: {name}")
        assert torch.equal(out.exit, out.confidence > 0.25)
        assert criterion != "max_prob" or torch.equal(out.confidence, out.probs.amax(1))


#: Logits at some classes of 64, which are 1.0 elsewhere: within a slice, at the borders of slices and of programs.
ROWS = {
    "equal in a slice": {5: 3.0, 9: 3.0},
    "equal at a border": {15: 3.0, 16: 3.0},
    "equal in slices that different programs write": {10: 3.0, 31: 3.0, 32: 3.0, 63: 3.0},
    "equal at both ends": {0: 3.0, 63: 3.0},
    "all equal": {},
    "zeros of both signs": {**dict.fromkeys(range(64), -1.0), 20: -0.0, 50: 0.0},
    "one slice has none": dict.fromkeys(range(16, 32), -INF),
    "one slice has one": dict.fromkeys(range(49), -INF),
    "one class": {**dict.fromkeys(range(64), -INF), 40: 7.0},
    "none": dict.fromkeys(range(64), -INF),
    "far apart": {3: -3e38, 33: 3e38, 60: 3e38},
    "a NaN first": {0: NAN},
    "a NaN": {35: NAN, 40: 5.0},
    "a NaN last": {63: NAN, 1: 9.0},
    "an infinity": {18: INF},
    "infinities in two slices": {2: INF, 50: INF},
    "an infinity before a NaN": {20: INF, 40: NAN},
    "a NaN in a slice of none": {**dict.fromkeys(range(16, 32), -INF), 20: NAN},
    "all NaN": dict.fromkeys(range(64), NAN),
}


@pytest.mark.parametrize("criterion", CRITERIA)
def test_any_logits_are_answered_as_in_one_piece(criterion, device):
    """Also such as are no numbers: the same label and exit as by the program that has all classes of a sample."""
    low, high = CRITERIA[criterion].range
    x, weight = torch.zeros(2, 16, device=device), torch.zeros(64, 16, device=device)
    for name, changed in ROWS.items():
        bias = torch.ones(64, device=device)
        for where, value in changed.items():
            bias[where] = value
        for threshold in (low, high):
            options = {"criterion": criterion, "threshold": threshold}
            with sliced(IN_PLACE, x, 64):
                out = fused_head(x, weight, bias, **options)
            with launched_as(replace(IN_PLACE, block_j=64), x, 64, "none"):
                whole = fused_head(x, weight, bias, **options)
            assert torch.equal(out.label, whole.label) and torch.equal(out.exit, whole.exit), name
            for field in ("probs", "confidence"):
                torch.testing.assert_close(
                    getattr(out, field), getattr(whole, field), rtol=1e-6, atol=1e-6, equal_nan=True, msg=name
                )
        if not (bias.isnan().any() or bias.max() == INF):
            assert out.label.tolist() == 2 * [int((bias == bias.max()).nonzero()[0])], name


@pytest.mark.parametrize("classes", CLASSES)
def test_a_temperature_that_is_no_positive_number_gives_no_answer(classes, monkeypatch):
    """On the device, where the host does not read it; here it is made not to."""
    monkeypatch.setattr(importlib.import_module("auxhead.kernels.fused_head"), "check_rule_tensors", lambda *_: None)
    x, weight, bias = make_head((3, 20), classes)
    with sliced(IN_PLACE, x, classes):
        label = fused_head(x, weight, bias).label
        for criterion in CRITERIA:
            for temperature in (0.0, -0.0, -1.0, NAN, -INF, INF):
                heat = torch.tensor(temperature)
                out = fused_head(x, weight, bias, criterion=criterion, temperature=heat, threshold=0.0)
                assert out.probs.isnan().all() and out.confidence.isnan().all() and not out.exit.any()
                assert torch.equal(out.label, label), "the label does not depend on the temperature"


def test_temperature_and_threshold_as_numbers_and_tensors(device):
    x, weight, bias = make_head((3, 20), 81, device=device)
    for temperature in (0.1, 1, 1.7, 1000.0):
        with sliced(IN_PLACE, x, 81):
            first = check_head(x, weight, bias, temperature=temperature, threshold=0.1)
            heat, limit = torch.tensor([float(temperature)], device=device), torch.tensor(0.1, device=device)
            assert_same_bits(first, fused_head(x, weight, bias, temperature=heat, threshold=limit))


def test_a_sample_that_is_not_finite_disturbs_no_other(device):
    x, weight, bias = make_head((9, 20), 81, device=device)
    with sliced(IN_PLACE, x, 81):
        whole = fused_head(x, weight, bias, threshold=0.0)
        for value in (NAN, INF, -INF):
            broken = x.clone()
            broken[4, 7] = value
            out = fused_head(broken, weight, bias, threshold=0.0)
            assert out.probs[4].isnan().all() and out.confidence[4].isnan() and not out.exit[4]
            others = [n for n in range(9) if n != 4]
            assert_same_bits(type(out)(*(one[others] for one in out)), type(out)(*(one[others] for one in whole)))


#: Shape, pool and its size, layers before the last one.
POOLED = {
    "windows": ((9, 5, 5, 7), "avg", (3, 1), None),
    "maxima": ((9, 5, 5, 7), "max", (5, 7), "relu"),
    "a map": ((3, 13, 3, 5), "avg", (1, 1), "norm"),
}


@pytest.mark.parametrize("name", POOLED)
def test_packed_features_behind_a_norm_too(name, device):
    """Of odd numbers of positions."""
    shape, pool, size, layers = POOLED[name]
    rectifies, norm = layers == "relu", "affine" if layers == "norm" else None
    x, weight, bias, hidden = make(
        shape, 33, rectifies=rectifies, norm=norm, pool=pool, pool_size=size, dtype=torch.float16, device=device
    )
    for config in (PACKED, replace(PACKED, max_programs=3)):
        with sliced(config, x, 33, pool, size), taken_counters() as taken:
            first = check(x, weight, bias, hidden, pool=pool, pool_size=size)
            again = fused_head(x, weight, bias, pool=pool, pool_size=size, threshold=0.5, hidden=hidden)
            assert_same_bits(first, again)
        assert not any(counters.any() for counters in taken)
        programs = config.programs(head_view(tuple(x.shape), x.stride(), pool, size), 33, hidden)
        assert {counters.numel() for counters in taken} == {programs.zeroed + 1}


def test_vectors_behind_a_norm(device):
    x, weight, bias, hidden = make((9, 20), 81, norm="affine", device=device)
    with sliced(IN_PLACE, x, 81), taken_counters() as taken:
        assert_same_bits(check(x, weight, bias, hidden), fused_head(x, weight, bias, threshold=0.5, hidden=hidden))
    assert not any(counters.any() for counters in taken) and taken[0].numel() == 3 * 9 + 1


@st.composite
def heads(draw):
    """A head of few programs, and a configuration that decides about it in slices."""
    in_place = draw(st.booleans())
    block_f, block_j = draw(st.sampled_from([16, 32])), draw(st.sampled_from([4, 16, 32]))
    config = LaunchConfig(
        block_n=draw(st.sampled_from([8, 16, 32])),
        block_c=block_f if in_place else draw(st.sampled_from([2, 8])),
        block_p=1 if in_place else draw(st.sampled_from([1, 2])),
        block_a=draw(st.sampled_from([1, 4])),
        block_f=block_f,
        block_k=draw(st.sampled_from([16, 32, 64])),
        block_s=1,
        block_j=block_j,
        window_parts=1,
        stages=1,
        num_warps=4,
        max_programs=draw(st.sampled_from([0, 0, 2])),
        weight_buffers=draw(st.integers(1, 5)),
        features="in place" if in_place else "packed",
    )
    samples, classes = draw(st.sampled_from([1, 3, 9])), draw(st.integers(block_j + 1, 70))
    shape = (samples, 21) if in_place else (samples, draw(st.integers(1, 5)), draw(st.integers(1, 5)), 3)
    pool_size = (1, 1) if in_place else (draw(st.integers(1, shape[2])), draw(st.sampled_from([1, 3])))
    return shape, "none" if in_place else "avg", pool_size, classes, config


@settings(max_examples=60 if torch.cuda.is_available() else 10)
@given(
    head=heads(), dtype=st.sampled_from(list(DTYPES.values())), criterion=st.sampled_from(list(CRITERIA)),
    bias=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_any_sliced_head(head, dtype, criterion, bias, seed, device):
    shape, pool, pool_size, classes, config = head
    pooling = {"pool": pool, "pool_size": pool_size}
    x, weight, offset = make_head(shape, classes, **pooling, dtype=dtype, device=device, bias=bias, seed=seed)
    options = {**pooling, "temperature": 1.3, "threshold": 0.3}
    with sliced(config, x, classes, pool, pool_size), taken_counters() as taken:
        first = check_head(x, weight, offset, **options)
        assert_same_bits(first, fused_head(x, weight, offset, **options))
        other = fused_head(x, weight, offset, criterion=criterion, **options)
    assert not any(counters.any() for counters in taken)
    torch.testing.assert_close(other.probs, first.probs)
    wanted = decide(first.probs.double().log(), 1.0, 0.3, criterion)
    assert torch.equal(other.label, first.label)
    if criterion != "energy":  # which does not follow from probabilities
        torch.testing.assert_close(other.confidence, wanted.confidence.float(), rtol=1e-3, atol=1e-4)


#: Of a network's heads: shape, pool, layers, criterion, configuration.
TOGETHER = [
    ((9, 20), "none", None, "entropy", IN_PLACE),
    ((9, 5, 3, 5), "avg", "norm", "patience", PACKED),
    ((9, 33), "none", None, "margin", replace(IN_PLACE, block_j=16, block_k=32)),
    ((9, 17), "none", None, "patience", replace(IN_PLACE, block_j=128)),  # in one piece
    ((9, 3, 5, 3), "max", None, "energy", PACKED),
    ((9, 24), "none", None, "max_prob", IN_PLACE),
]


@pytest.mark.parametrize("programs", [0, 5])
def test_heads_of_a_network_are_merged(programs, device):
    """The last program that writes some of a sample's probabilities joins with those of other heads."""
    classes, made, inputs, outputs = 81, [], [], []
    one = torch.ones((), device=device)
    with ExitStack() as stack:
        for number, (shape, pool, layers, criterion, config) in enumerate(TOGETHER):
            norm = "affine" if layers == "norm" else None
            x, weight, bias, hidden = make(shape, classes, norm=norm, pool=pool, pool_size=1, device=device)
            weight, bias = make_linear(feature_count(shape, pool), classes, device=device, seed=number)
            config = replace(config, max_programs=programs)
            stack.enter_context(launched_as(config, x, classes, pool))
            alone = fused_head_reference(
                x, weight, bias, pool=pool, pool_size=(1, 1), temperature=1.0, threshold=1.0, criterion=criterion,
                hidden=hidden,
            )  # fmt: skip
            limit = torch.tensor(1.0, device=device) if criterion == "patience" else alone.confidence.quantile(0.8)
            outputs.append(alone._replace(exit=alone.confidence > limit))
            outputs[-1] = in_order(outputs, limit, criterion)
            made.append(ExitHead(weight, bias, one, limit, pool, (1, 1), criterion, hidden))
            inputs.append(x)
        buffers = ExitBuffers.allocate(len(made), 9, classes, with_probs=True, device=device)
        launch = ExitLaunch(buffers, 0, made)
        wanted = merge(outputs, with_probs=True)
        assert len(set(wanted.exit_index.tolist())) > 2
        for _ in range(2):
            buffers.packed_answer.fill_(255)
            buffers.probs.fill_(NAN)
            buffers.label.fill_(-7)
            launch(inputs)
            assert sum(space.constants.surveys for space in launch._spaces.values()) == len(made) - 1
            for place, output in enumerate(outputs):
                torch.testing.assert_close(buffers.probs[place], output.probs)
                assert torch.equal(buffers.label[place], output.label)
            label, exit_index, confidence, probs = buffers.answer(buffers.packed_answer)
            assert torch.equal(exit_index, wanted.exit_index) and torch.equal(label, wanted.label)
            torch.testing.assert_close(confidence, wanted.confidence)
            torch.testing.assert_close(probs, wanted.probs)
            assert not any(counters.any() for counters in launch._counters)
            arrived = [space.arguments.workspace[2] for space in launch._spaces.values()]
    assert not any(one.any() for one in arrived if one is not None)
