"""A backbone's forward from tap to tap is the whole one, part by part; what cannot be cut is refused by name."""

import copy
from itertools import pairwise

import pytest
import torch
import torchvision
from auxhead.model import EarlyExitNetwork, Extract, FusedAuxHead, attach
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.listening import between
from auxhead.model.listening.taps import listening
from auxhead.model.parallel.cut import Cut
from support import pipeline_ranks
from support.example_models import Counting
from torch import nn

pytestmark = pytest.mark.usefixtures("without_interpreter")
CPU = torch.device("cpu")


class Tuples(nn.Module):
    """Blocks like those of transformers: a tuple with one tensor, layers given by name, parameters of the root."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.linear = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

        def forward(self, hidden, *, scale):
            attended, _ = self.attention(hidden, hidden, hidden, need_weights=False)
            return (hidden + scale * self.linear(attended), None)

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 8), nn.Parameter(torch.randn(6, 8))
        self.blocks = nn.ModuleList([self.Block() for _ in range(3)])
        self.classes = nn.Linear(8, 5)

    def forward(self, ids):
        hidden, samples = self.embed(ids) + self.place, ids.shape[0]
        for block in self.blocks:
            hidden = block(hidden=hidden, scale=0.5)[0]
        return self.classes(hidden.view(samples, 6, 8).mean(1))


class Odd(nn.Module):
    """A layer without parameters everywhere, work in place, sizes read at the start and used at the end."""

    def __init__(self):
        super().__init__()
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.third, self.classes = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.Linear(8, 5)

    def forward(self, x):
        samples, (height, _) = x.shape[0], x.shape[2:]
        x = self.pool(self.relu(self.first(x)))
        x = nn.functional.relu_(self.norm(self.second(x)))
        x = self.third(self.relu(x).mul_(2.0))
        return self.classes(self.relu(x).view(samples, 8, height // 2, -1).mean((2, 3)))


def tuples():
    extract = {tap: Extract(0) for tap in ("blocks.0", "blocks.1")}
    heads = {tap: FusedAuxHead(8, 5) for tap in extract}
    return EarlyExitNetwork(Tuples(), heads, extract=extract).eval(), torch.randint(20, (5, 6))


def odd():
    heads = {tap: FusedAuxHead(8, 5) for tap in ("first", "second", "third")}
    return EarlyExitNetwork(Odd(), heads).eval(), torch.randn(5, 3, 8, 8)


def of_torchvision(name, *taps, size=64, **options):
    def made():
        model = getattr(torchvision.models, name)(num_classes=5, **options).eval()
        x = torch.randn(3, 3, size, size)
        return attach(model, taps, example_input=x).eval(), x

    return pytest.param(made, id=name)


NETWORKS = [
    pytest.param(tuples, id="tuples"),
    pytest.param(odd, id="odd"),
    pytest.param(lambda: (pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 5)), id="plain"),
    pytest.param(lambda: (pipeline_ranks.tokens(), pipeline_ranks.batch_of("tokens", 5)), id="tokens"),
    of_torchvision("resnet18", "layer1.0", "layer1", "layer3"),
    of_torchvision("mobilenet_v3_small", "features.3", "features.8"),
    of_torchvision("vit_b_32", "encoder.layers.encoder_layer_3", size=64, image_size=64),
    of_torchvision("swin_t", "features.1", "features.3"),
]


def placed(cut, starts, x, trunk="as_is"):
    """Return the parts of a network on the CPU."""
    parts = []
    with torch.no_grad():
        for start, end in pairwise([*starts, cut.segments]):
            parts.append(cut.place(start, end, cut.move(start, end, CPU), x, trunk))
            x = parts[-1].run(x, lambda *_: None)
    return parts


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
@pytest.mark.parametrize("made", NETWORKS)
def test_parts_are_the_backbone(made, trunk):
    """Of other batch sizes than they were made with, too; each has the memory of what it reads and of nothing else."""
    torch.manual_seed(0)
    network, x = made()
    network.check_taps(x)
    whole, state = copy.deepcopy(network), {name: id(each) for name, each in network.named_parameters()}
    cut = Cut(network, x)
    assert not cut.uncuttable
    parts = placed(cut, range(cut.segments), x, trunk)
    assert {name: id(each) for name, each in network.named_parameters()} == state
    if trunk == "as_is":
        seen = [{id(each) for each in part.trunk.module.parameters() if not each.is_meta} for part in parts]
        assert set().union(*seen) == {id(each) for each in network.backbone.parameters()}
        assert sum(map(len, seen)) == len(set().union(*seen)), "two have the same"
    for batch in (x, torch.cat([x, x])[:7], x[:1]):
        wanted, found, y = [], [], batch.clone()
        with torch.no_grad():
            with listening(whole.backbone, whole.taps, lambda _, read: wanted.append(read.clone()), whole.reading):  # noqa: B023
                wanted.append(whole.backbone(batch.clone()))
            for part in parts:
                y = part.run(y, lambda _, read: found.append(read.clone()))  # noqa: B023
        for one, other in zip([*found, y], wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_where_no_part_can_end():
    """The batch goes past one tap; two parts would have one parameter; a tap that is inside of a residual branch."""
    cut = Cut(pipeline_ranks.skipping(), torch.randn(3, 6))
    assert cut.segments == 1 and "add at pipeline_ranks.py:" in cut.uncuttable["mix"]
    assert cut.uncuttable["mix"].endswith("reads the batch, which goes past it")
    model = torchvision.models.resnet18(num_classes=5).eval()
    heads = {"layer1.0.conv1": FusedAuxHead(64, 5), "layer2": FusedAuxHead(128, 5)}
    network = EarlyExitNetwork(model, heads, example_input=torch.randn(2, 3, 64, 64)).eval()
    cut = Cut(network, torch.randn(2, 3, 64, 64))
    assert cut.ends == ["layer2"] and "which goes past it" in cut.uncuttable["layer1.0.conv1"]
    first, second = placed(cut, (0, 1), torch.randn(2, 3, 64, 64))
    assert (first.first_exit, len(first.heads), second.first_exit, len(second.heads)) == (0, 2, 2, 0)


def test_a_parameter_that_two_parts_would_read():
    network, x = odd()
    network.backbone.third.bias = network.backbone.second.bias
    network.check_taps(x)
    cut = Cut(network, x)
    with pytest.raises(BadInput, match="its 'second.bias' is read before the end of 'second' and behind it"):
        cut.check_parts([0, 2])
    cut.check_parts([0, 1])


def test_a_network_with_a_state_or_a_host_that_reads_is_refused():
    network, x = pipeline_ranks.plain(), pipeline_ranks.batch_of("plain", 4)
    network.backbone[1] = Counting(network.backbone[1])
    with pytest.raises(BadInput, match="network: a forward writes to '1.calls', wants none that does"):
        Cut(network, x)
    network = pipeline_ranks.plain()
    network.backbone[1].forward = lambda x: x if bool(x.sum() > 0) else -x
    with pytest.raises(BadInput, match="reads a number on the host at test_between.py:"):
        Cut(network, x)


def test_what_was_moved_can_be_moved_back():
    network, x = odd()
    network.check_taps(x)
    cut, before = Cut(network, x), dict(network.named_parameters())
    own = cut.move(0, 1, torch.device("cpu"))
    assert {*own} == {id(network.backbone.first.weight), id(network.backbone.first.bias)}
    cut.move_back()
    assert all(each is before[name] for name, each in network.named_parameters())


def test_hooks_of_the_users_are_called_once_for_each_batch():
    """Where their layer runs, and not with tensors on ``meta`` on the way to a later part."""
    network, x = odd()
    network.check_taps(x)
    seen = []
    for name in ("norm", "pool", "classes"):  # not at taps
        layer = network.backbone.get_submodule(name)
        layer.register_forward_hook(lambda _layer, _inputs, output, name=name: seen.append((name, output.sum())))
    cut = Cut(network, x)
    parts = placed(cut, range(cut.segments), x)
    seen.clear()
    y = x
    with torch.no_grad():
        for part in parts:
            y = part.run(y, lambda *_: None)
        parted = [*seen]
        seen.clear()
        network.backbone(x)
    assert [(name, float(total)) for name, total in parted] == [(name, float(total)) for name, total in seen]
    assert [name for name, _ in seen] == ["pool", "norm", "classes"]


class Leaving(nn.Linear):
    """Leaves behind how many samples there are."""

    left = ()

    def forward(self, x):
        self.left[:] = [float(len(x))]
        return super().forward(x)


class Reads(nn.Module):
    """Three layers, of whose forward a part sees one thing too little."""

    def __init__(self, what):
        super().__init__()
        self.what, self.left = what, [1.0]
        self.a, self.b, self.c = nn.Linear(8, 8), Leaving(8, 8), nn.Linear(8, 5)
        self.b.left = self.left
        self.b.factor = 3.0
        self.shift = torch.ones(8)  # no buffer

    def forward(self, x):
        on_cpu, learns = x.device.type == "cpu", self.a.weight.requires_grad
        width = torch.arange(8.0, device=x.device) if self.what == "arange" else None
        y = self.a(x + self.shift) if self.what == "constant" else self.a(x)
        y = self.b(y)
        if self.what == "left behind":
            y = y * self.left[0]
        if self.what == "device" and on_cpu:
            y = y * 9.0
        if self.what == "gradients" and learns:
            y = y * 9.0
        if self.what == "arange":
            y = y * width
        if self.what == "class" and isinstance(self.b, nn.Linear):
            y = y * self.b.factor * self.b.out_features
        return self.c(y)


def reading(what):
    return EarlyExitNetwork(Reads(what), {"b": FusedAuxHead(None, 5)}, example_input=torch.randn(2, 8)).eval()


@pytest.mark.parametrize("trunk", ["as_is", "cudnn"])
@pytest.mark.parametrize("what", ["class", "gradients"])
def test_a_layer_at_which_parts_meet_is_what_it_is(what, trunk):
    """For who asks for its class and what it has; and parameters elsewhere say whether they learn."""
    network, x = reading(what), torch.randn(5, 8)
    with torch.no_grad():
        wanted = network.backbone(x)
    (first, second) = placed(Cut(network, x), (0, 1), x, trunk)
    with torch.no_grad():
        found = second.run(first.run(x, lambda *_: None), lambda *_: None)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "what, message",
    [
        ("device", "entered behind 'b' its forward gives other numbers, as it reads what it is told before"),
        ("constant", "entered behind 'b' its forward fails .*as it reads what it makes before"),
        ("left behind", "entered behind 'b' its forward gives other numbers"),
    ],
)
def test_what_a_part_cannot_see_is_refused(what, message):
    network, x = reading(what), torch.randn(5, 8)
    cut = Cut(network, x)
    with pytest.raises(BadInput, match=message):
        placed(cut, (0, 1), x)


@pytest.mark.parametrize("beside", [3, "text", torch.ones(1)], ids=str)
def test_taps_that_return_more_than_a_tensor(beside):
    network, x = reading(""), torch.randn(5, 8)
    layer = network.backbone.a
    network.backbone.a = nn.Identity()
    network.backbone.b = nn.Sequential(layer, network.backbone.b)

    class Pair(nn.Module):
        def forward(self, y):
            return y, beside

    network.backbone.pair = Pair()
    network.backbone.c = nn.Sequential(nn.Linear(8, 5))
    network.backbone.forward = lambda x: network.backbone.c(network.backbone.pair(network.backbone.b(x))[0])
    network = EarlyExitNetwork(network.backbone, {"pair": FusedAuxHead(None, 5)}, extract={"pair": Extract(0)}).eval()
    network.check_taps(x)
    cut = Cut(network, x)
    assert not cut.ends and "wants one tensor" in cut.uncuttable["pair"]


def test_taps_with_hooks_of_the_users_end_no_part():
    network, x = odd()
    network.check_taps(x)
    network.backbone.second.register_forward_hook(lambda _layer, _inputs, output: output * 2)
    cut = Cut(network, x)
    assert cut.ends == ["first", "third"] and "it carries hooks" in cut.uncuttable["second"]


def test_scripted_layers_are_refused_and_left_alone():
    network, x = reading(""), torch.randn(5, 8)
    network.backbone.a = torch.jit.script(network.backbone.a)
    with pytest.raises(BadInput, match="its 'a' is a ScriptModule with parameters"):
        Cut(network, x)
    assert not any(each.is_meta for each in network.parameters())


def test_operations_are_told_apart_by_numbers_and_not_by_devices():
    """A process has a GPU of its own."""
    network, x = odd()
    network.check_taps(x)
    found, forward = [], type(network.backbone).forward
    for number, device in ((1.0, "cpu"), (1.0, "cpu:0"), (2.0, "cpu")):
        network.backbone.forward = lambda x, number=number, device=device: (
            forward(network.backbone, x) * number + torch.zeros(1, device=torch.device(device))
        )
        found.append(Cut(network, x).operations)
    assert found[0] == found[1] != found[2]


def test_tensors_stay_on_the_device_of_their_part():
    """And come there from others: of a part on ``meta`` here, as a second device there is nowhere."""
    here, there = torch.ones(2), torch.ones(2, device="meta")
    with between._DevicesStay(torch.device("meta")):
        assert there.to("cpu") is there and there.cpu() is there and there.to(device="cpu", dtype=torch.half).is_meta
        assert here.to("meta").is_meta and here.to("cpu") is here and here.to(there).is_meta
        assert here.to(torch.float64).dtype == torch.float64 and not here.to("cpu", torch.half).is_meta
    with between._DevicesStay(torch.device("cpu")):
        assert here.to("meta") is here and there.to("cpu") is there
        channels_last = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
