"""Networks of several inputs in runners: batches packed into rows, and padded to lengths that runners are made for."""

from collections import UserDict

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, attach, make_runner
from auxhead.model.listening.packing import Packing
from support.several_inputs import CLASSES, TwoStreams, Words, streams, words

pytestmark = pytest.mark.usefixtures("without_interpreter", "without_gradients")
#: On the CPU there are no graphs.
WAYS = ["eager", *["overlapped", "polled", "gated"] * torch.cuda.is_available()]


def assert_same(found, wanted):
    """Other sizes and trunks round in other places."""
    assert found.exit_index.equal(wanted.exit_index) and found.label.equal(wanted.label)
    torch.testing.assert_close(found.confidence, wanted.confidence, rtol=1e-4, atol=1e-5)


def on(device, x):
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {key: on(device, each) for key, each in x.items()}
    return tuple(on(device, each) for each in x) if isinstance(x, tuple) else x


@pytest.fixture
def of_words(device):
    torch.manual_seed(0)
    net = attach(Words().eval().to(device), ["encoder.layers.0"], example_input=on(device, words(9, 4))).eval()
    net.set_rules(0.45)
    return net


@pytest.fixture
def of_streams(device):
    torch.manual_seed(0)
    heads = {tap: FusedAuxHead(8, CLASSES) for tap in ("pictures", "motion", "fusion")}
    example = on(device, streams(5))
    net = EarlyExitNetwork(TwoStreams().eval(), heads, 0.45).to(device).eval()
    net.check_taps(example)
    return net


SAMPLES = {
    "numbers of a sample": torch.arange(3.0),
    "halves": torch.randn(3, 5).half(),
    "bytes": torch.randint(255, (3, 7), dtype=torch.uint8),
    "bools": torch.rand(3, 2, 3) > 0.5,
    "ids": torch.randint(9, (3, 4)),
    "complex": torch.randn(3, 3, dtype=torch.complex64),
    "channels_last": torch.randn(3, 5, 4, 6).contiguous(memory_format=torch.channels_last),
    "expanded": torch.randn(3, 1, 2).expand(3, 4, 2),
    "negated": torch.randn(3, 2, dtype=torch.complex64).conj().imag,
}


def test_rows_hold_what_was_packed(device):
    batch = {"nested": (on(device, SAMPLES), None, [2]), "shift": 1.5}
    packing = Packing("x", batch)
    rows = packing.pack(batch, device)
    found = packing.unpack(rows)
    assert rows.shape[0] == 3 and rows.dtype == torch.uint8
    assert found["shift"] == 1.5 and found["nested"][1:] == (None, [2])
    for name, each in SAMPLES.items():
        assert found["nested"][0][name].equal(each.to(device)) and found["nested"][0][name].dtype == each.dtype, name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_answers_are_those_of_the_network(of_streams, device, way, form):
    def batch(samples, seed):
        pictures, motion, times = on(device, streams(samples, seed))
        if form == "tuple":
            return pictures, motion, times
        return {"times": times, "scale": 1.5, "pictures": pictures, "motion": motion}

    found = set()
    sure = [each.softmax(1).amax(1).quantile(0.6).item() for each in of_streams.logits(batch(64, 0))]
    of_streams.set_rules(dict(zip(of_streams.taps, sure, strict=False)))
    with make_runner(of_streams, batch(4, 1), exits=way, batch_sizes=(2, 4)) as runner:
        for samples in (1, 3, 4, 9):
            x = batch(samples, samples)
            wanted = of_streams(x)
            found.update(wanted.exit_index.tolist())
            assert_same(runner(x), wanted)
            assert_same(runner(on("cpu", x)), wanted)
        if form == "dict":
            x = batch(3, 3)
            assert_same(runner(UserDict(reversed(x.items()))), of_streams(x))
    assert len(found) > 1


def trunks_of(device):
    return ("as_is", "cudnn", "branched", "inductor") if device.type == "cuda" else ("as_is", "cudnn", "branched")


def test_every_trunk_reads_the_rows(of_streams, of_words, device):
    for net, x in ((of_streams, on(device, streams(4))), (of_words, on(device, words(9, 5, 3)))):
        wanted = net(x)
        for trunk in trunks_of(device):
            with make_runner(net, x, exits="overlapped" if device.type == "cuda" else "eager", trunk=trunk) as runner:
                assert_same(runner(x), wanted)


@pytest.mark.parametrize("way", WAYS)
def test_padding_is_left_out_at_every_length(of_words, device, way):
    """What is in the padding, and how much of it there is, changes no answer."""
    example = on(device, words(9, 4))
    with make_runner(of_words, example, exits=way, lengths=(24, 6, 12)) as runner:
        assert runner.describe().count("\nUp to ") == 3
        for lengths in ((3, 6), (12, 1), (5,), (7, 24, 13), (2, 2)):
            wanted = of_words(on(device, words(*lengths)))
            for to in range(max(lengths), 25, 5):
                x = on(device, words(*lengths, to=to))
                assert_same(runner(x), wanted)
                again = runner({**x, "ids": torch.where(x["padding_mask"], 29 - x["ids"], x["ids"])})
                assert again.confidence.equal(runner(x).confidence), "not even by rounding"
        with pytest.raises(ValueError, match="x: has 25 tokens, wants at most 24, the longest of lengths"):
            runner(on(device, words(25, 3)))


def test_rules_and_weights_are_followed(of_words, device):
    x = on(device, words(5, 3))
    with make_runner(of_words, x, lengths=(8,), plan=None) as runner:
        for threshold in (0.0, 1.0):
            of_words.set_rules(threshold)
            assert runner(x).exit_index.tolist() == [int(threshold)] * 2
        of_words.backbone.classifier.bias.add_(torch.tensor([9.0, 0.0, 0.0], device=device))
        runner.refresh()
        assert runner(x).label.tolist() == [0, 0]


WORDS = words(9, 4)
REFUSED = {
    "a tensor": (WORDS["ids"], TypeError, "x: got Tensor, wants .*ids.*padding_mask"),
    "an argument more": ({**WORDS, "more": WORDS["ids"]}, TypeError, "x: got .*more.*, wants"),
    "an argument less": ({"ids": WORDS["ids"]}, TypeError, r"x: got \['ids'\], wants \['ids', 'padding_mask'\]"),
    "dtype": ({**WORDS, "ids": WORDS["ids"].int()}, TypeError, r"x\['ids'\]: got torch.int32, wants torch.int64"),
    "no tensor": ({**WORDS, "ids": "words"}, TypeError, r"x\['ids'\]: got str, wants a torch.Tensor"),
    "tokens": (words(8, 4), ValueError, r"x\['ids'\]: got shape \[2, 8\], wants \[N, 9\] and N >= 1"),
    "samples": (
        {**WORDS, "ids": WORDS["ids"][:1]},
        ValueError,
        r"x\['padding_mask'\]: got shape \[2, 9\], .*one N for all",
    ),
    "none": ({key: each[:0] for key, each in WORDS.items()}, ValueError, r"x\['ids'\]: got shape \[0, 9\]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_batches_are_refused(of_words, device, what):
    x, error, message = REFUSED[what]
    with make_runner(of_words, on(device, WORDS), exits="eager") as runner:
        with pytest.raises(error, match=message):
            runner(x)
        assert_same(runner(WORDS), of_words(on(device, WORDS)))


def test_constants_stay_those_of_the_example(of_streams, device):
    x = dict(zip(("pictures", "motion", "times"), on(device, streams(3)), strict=True))
    with make_runner(of_streams, {**x, "scale": 2.0}, exits="eager") as runner:
        runner({**x, "scale": 2.0})
        with pytest.raises(ValueError, match=r"x\['scale'\]: got 1.0, wants 2.0, as the example input has"):
            runner({**x, "scale": 1.0})
    with pytest.raises(
        ValueError, match=r"example_input\['scale'\]: got a tensor \[\] .*, wants a row of numbers for each"
    ):
        make_runner(of_streams, {**x, "scale": torch.tensor(2.0)}, exits="eager")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"lengths": ()}, ValueError, r"lengths: got \(\), wants numbers of tokens"),
        ({"lengths": (8, 0)}, ValueError, "lengths: got"),
        ({"lengths": 8}, ValueError, "lengths: got 8"),
        ({"lengths": "auto"}, ValueError, "lengths: got 'auto'"),
        ({"trunk": "fast"}, ValueError, "trunk: got 'fast'"),
    ],
)
def test_other_arguments_are_refused(of_words, device, options, error, message):
    with pytest.raises(error, match=message):
        make_runner(of_words, on(device, WORDS), **options)


def test_lengths_want_one_mask(of_streams, device):
    with pytest.raises(ValueError, match="example_input: got 0 masks, wants one .*attention_mask"):
        make_runner(of_streams, on(device, streams(3)), lengths=(8,))
    with pytest.raises(TypeError, match="example_input: got Tensor, wants a tuple or dict of the backbone's arguments"):
        make_runner(of_streams, on(device, streams(3))[0], lengths=(8,))


def test_a_forward_of_the_instance_is_refused(of_words, device):
    of_words.backbone.forward = of_words.backbone.forward
    with pytest.raises(TypeError, match="backbone: is Words with a forward set on the instance"):
        make_runner(of_words, on(device, WORDS))
