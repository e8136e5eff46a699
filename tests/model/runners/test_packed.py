"""Networks of several inputs in runners: batches packed into rows, and padded to lengths that runners are made for."""

from collections import UserDict

import pytest
import torch
from auxhead.model import EarlyExitNetwork, Extract, FusedAuxHead, attach, make_runner
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
    rows = packing.pack(packing.leaves(batch), device)
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
        with pytest.raises(ValueError, match="x: has 25 tokens, wants 1 to 24, the longest of lengths"):
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
    "an argument less": ({"ids": WORDS["ids"]}, TypeError, r"x: got dict .*'ids'.*, wants .*ids.*padding_mask"),
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


def test_lengths_want_one_mask(of_streams, of_words, device):
    with pytest.raises(ValueError, match="network: .*in training mode, wants network.eval()"):
        make_runner(of_words.train(), on(device, WORDS), lengths=(16,))
    with pytest.raises(ValueError, match="example_input: lengths are padded by a mask, wants one .*attention_mask"):
        make_runner(of_streams, on(device, streams(3)), lengths=(8,))
    with pytest.raises(TypeError, match="example_input: got Tensor, wants a tuple or dict of the backbone's arguments"):
        make_runner(of_streams, on(device, streams(3))[0], lengths=(8,))


def test_a_forward_of_the_instance_is_refused(of_words, device):
    of_words.backbone.forward = of_words.backbone.forward
    with pytest.raises(TypeError, match="backbone: is a Words with a forward set on the instance"):
        make_runner(of_words, on(device, WORDS))


def test_hooks_and_compiled_calls_of_the_backbone_would_be_given_rows(of_words, device):
    x = on(device, WORDS)
    with make_runner(of_words, x, exits="eager") as runner:
        handle = of_words.backbone.register_forward_pre_hook(lambda _module, _inputs: None)
        for call in (lambda: runner(x), lambda: make_runner(of_words, x, exits="eager")):
            with pytest.raises(TypeError, match="backbone: is a Words with hooks, which would be given rows"):
                call()
        handle.remove()
        runner(x)
        of_words.backbone.compile(backend="eager")
        with pytest.raises(TypeError, match="backbone: is a Words with a compiled call"):
            runner(x)


class Masked(Words):
    """Takes what a subclass or caller calls padding: by scores that are added, the opposite, or its own id."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, ids, padding_mask=None, attention_mask=None, regions=None):
        if self.kind == "scores":
            padding_mask = padding_mask < 0
        elif self.kind == "the opposite":
            padding_mask = attention_mask > 0
        elif self.kind == "ids":
            padding_mask = ids == 29
        logits = super().forward(ids, padding_mask)
        return logits if regions is None else logits + regions.mean((1, 2))[:, None]


def masked(kind, *lengths, to=None):
    x = words(*lengths, to=to)
    ids, padding = x["ids"].clamp(max=28), x["padding_mask"]
    if kind == "scores":
        return {"ids": ids, "padding_mask": torch.zeros(ids.shape).masked_fill(padding, -torch.inf)}
    if kind == "the opposite":
        return {"ids": ids, "attention_mask": padding.long()}
    return {"ids": ids.masked_fill(padding, 29), "attention_mask": (~padding).long()}


@pytest.mark.parametrize("kind", ["scores", "the opposite", "ids"])
def test_padding_is_what_it_is_in_the_example(device, kind):
    """A mask of scores, one that says the opposite, and an id by which the backbone knows it."""
    torch.manual_seed(0)
    extract = {"encoder.layers.0": Extract(mask="~attention_mask")} if kind == "the opposite" else None
    x = on(device, masked(kind, 9, 4))
    net = attach(Masked(kind).eval().to(device), ["encoder.layers.0"], example_input=x, extract=extract).eval()
    with make_runner(net, x, exits="eager", lengths=(8, 16)) as runner:
        for lengths in ((3, 6), (12, 1), (16, 9)):
            assert_same(runner(on(device, masked(kind, *lengths))), net(on(device, masked(kind, *lengths))))


def test_lengths_are_refused_where_padding_changes_an_answer(of_words, device):
    x = on(device, {**words(9, 4), "regions": torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0))})
    torch.manual_seed(0)
    model = Masked("plain").eval().to(device)
    net = attach(model, ["encoder.layers.0"], example_input=x).eval()
    with pytest.raises(
        ValueError, match="logits of the classifier change by .* padded to 16 tokens; wants .* another num"
    ):
        make_runner(net, x, lengths=(16,))
    x["regions"] = x["regions"][:, :5]
    with make_runner(net, x, exits="eager", lengths=(16,)) as runner:
        other = on(device, {**words(5, 4), "regions": torch.ones(2, 5, 3)})  # as many as tokens, by accident
        assert_same(runner(other), net(other))
    extract = {"encoder.layers.0": Extract(mask=None)}
    reads_padding = attach(
        Words().eval().to(device), ["encoder.layers.0"], example_input=on(device, WORDS), extract=extract
    )
    with pytest.raises(ValueError, match="logits of encoder.layers.0 change by"):
        make_runner(reads_padding.eval(), on(device, WORDS), lengths=(16,))
