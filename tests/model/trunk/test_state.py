"""Trunks of forwards that do more than compute: they change in place, count, make, draw."""

import pytest
import torch
import torch.nn.functional as F
from auxhead.model.trunk.trunk import TRUNKS, make_trunk
from support.trunk_cases import Net, assert_same, conv, logits, made, with_odd_norms
from torch import Tensor, nn


def assert_same_beyond_the_example(backbone: Net, kind: str) -> None:
    """Of a branch that is zero at first, as residual ones are made, the example does not show what changes."""
    with torch.no_grad():
        backbone.norm_b.weight.zero_()
        backbone.norm_b.bias.zero_()
    trunk = made(backbone, [], torch.randn(2, 4, 6, 6), kind)
    with_odd_norms(backbone)
    trunk.refresh()
    assert_same(trunk, backbone, [], torch.randn(2, 4, 6, 6))


def changed_input(net: Net, x: Tensor) -> Tensor:
    y = x
    y += 1.0
    return F.relu(net.first(x))


def changed_skip(net: Net, x: Tensor) -> Tensor:
    skip = y = net.first(x)
    y += net.second(x)
    y *= 0.5
    return F.relu(y + skip)


def changed_in_another_order(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    turned = y.mT
    turned += net.second(x)
    return F.relu(y)


def changed_data(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    data = y.data
    data += net.second(x)
    return F.relu(y)


def counted_on(net: Net, x: Tensor) -> Tensor:
    """A number is none that is changed in place."""
    y = net.first(x)
    more = channels = y.size(1)
    more += 1
    return F.relu(y + more) + net.second(x) * channels


def multiplied(net: Net, x: Tensor) -> Tensor:
    """Nor is a tensor by a product of matrices."""
    skip = y = net.second(x)
    y @= net.first(x)
    return F.relu(y + skip + net.first(x))


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
@pytest.mark.parametrize(
    "join", [changed_input, changed_skip, changed_in_another_order, changed_data, counted_on, multiplied]
)
def test_an_alias_that_is_changed_in_place_is_changed_in_a_trunk(kind, join) -> None:
    assert_same_beyond_the_example(with_odd_norms(Net(join)), kind)


def changed_copy(net: Net, x: Tensor) -> Tensor:
    """Of maps in channels_last it is none."""
    y = net.first(x)
    copied = y.permute(0, 2, 3, 1).contiguous()
    copied += net.second(x).permute(0, 2, 3, 1)
    return F.relu(y + 0.5 * copied.permute(0, 3, 1, 2))


def changed_rows(net: Net, x: Tensor) -> Tensor:
    """Of maps in channels_last they are a copy."""
    y = net.first(x)
    rows = y.reshape(y.size(0), -1)
    rows += net.second(x).flatten(1)
    return F.relu(y)


def changed_beside_a_copy(net: Net, x: Tensor) -> Tensor:
    """Of contiguous maps that is the same memory."""
    y = net.first(x)
    copied = y.contiguous()
    y += net.second(x)
    return F.relu(copied)


def changed_beside_rows(net: Net, x: Tensor) -> Tensor:
    y = net.first(x)
    rows = y.reshape(y.size(0), -1)
    y += net.second(x)
    return F.relu(rows.view(x.shape[0], -1, x.shape[2], x.shape[3]))


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
@pytest.mark.parametrize("join", [changed_copy, changed_rows, changed_beside_a_copy, changed_beside_rows])
def test_what_is_an_alias_in_one_layout_is_not_run_in_another(kind, join) -> None:
    backbone = with_odd_norms(Net(join))
    with torch.no_grad():
        backbone.norm_b.weight.zero_()
        backbone.norm_b.bias.zero_()
    x = torch.randn(2, 4, 6, 6)
    trunk = make_trunk(backbone, [], x, kind)
    with_odd_norms(backbone)
    trunk.refresh()
    assert_same(trunk, backbone, [], x)
    trunk = made(backbone, [], x.contiguous(memory_format=torch.channels_last), kind)
    assert torch.allclose(logits(trunk, x := x.contiguous(memory_format=torch.channels_last)), backbone(x), atol=1e-5)


def changed_first(net: Net, x: Tensor) -> Tensor:
    """What is copied of it then is so in any layout, and of what was copied before nobody reads."""
    y = net.first(x)
    size = y.contiguous().shape[0]
    y += net.second(x)
    return F.relu(y.reshape(size, -1).view(y.shape) + y.contiguous())


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
def test_what_is_changed_before_it_is_copied_is_the_same_in_any_layout(kind) -> None:
    assert_same_beyond_the_example(with_odd_norms(Net(changed_first)), kind)


class ChangedBehind(Net):
    """Changes its last map once that is pooled."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        pooled = y.mean((2, 3))
        y += self.second(x)
        return self.fc(pooled)


@pytest.mark.usefixtures("uncompiled_on_the_cpu")
@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
def test_a_classifier_reads_what_it_reads_in_the_backbone(kind) -> None:
    """Taken off, it would read that behind the change."""
    assert_same_beyond_the_example(with_odd_norms(ChangedBehind(None)), kind)


class Counting(nn.Module):
    """Counts its calls in a buffer, and answers by them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls.add_(1)


@pytest.mark.parametrize("kind", TRUNKS)
def test_a_forward_that_changes_its_state_does_so_each_time(kind, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **_options: f)
    backbone = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), Counting(), nn.Flatten(), nn.Linear(64, 3))
    trunk = make_trunk(backbone.eval(), (), x := torch.randn(2, 3, 4, 4), kind)
    calls = backbone[3].calls
    for _ in range(2):
        before = calls.clone()
        logits(trunk, x)
        assert calls - before == 2, trunk.notes


def marks(y: Tensor) -> Tensor:
    """The largest number of each sample sets one in what is made anew."""
    marked = torch.zeros(4)
    marked.index_fill_(0, y.argmax(1), 1.0)
    return y * marked


def marks_in_part(y: Tensor) -> Tensor:
    marked = torch.zeros(8)
    marked[:4].index_fill_(0, y.argmax(1), 1.0)
    return y * marked[:4]


class Marking(nn.Module):
    def __init__(self, mark) -> None:
        super().__init__()
        self.first, self.fc, self.mark = nn.Linear(4, 4), nn.Linear(4, 3), mark

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.mark(self.first(x)))


@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
@pytest.mark.parametrize("mark", [marks, marks_in_part])
def test_what_a_forward_makes_anew_does_not_hold_what_calls_before_have_written(kind, mark, monkeypatch) -> None:
    """Which no example shows that is run again and again."""
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    backbone = Marking(mark).eval()
    trunk = make_trunk(backbone, (), x := torch.eye(4)[:2], kind)
    for each in (x, -x, x.flip(1), x):
        assert torch.allclose(logits(trunk, each), logits(make_trunk(backbone, (), x), each), atol=1e-5)
    assert trunk.module is backbone and "makes anew" in trunk.notes[0]


@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
def test_random_numbers_are_drawn_each_time(kind, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda f, **_options: f)
    backbone = Marking(lambda y: y * torch.rand(4)).eval()
    trunk = make_trunk(backbone, (), x := torch.randn(2, 4), kind)
    assert not torch.equal(logits(trunk, x), logits(trunk, x))


class Scaled(nn.Module):
    """Scales by what it computes from buffers, as torchvision's FrozenBatchNorm2d does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.rsqrt().reshape(1, -1, 1, 1)


@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
def test_what_is_computed_from_buffers_follows_them(kind, monkeypatch) -> None:
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    backbone = nn.Sequential(conv(3, 4), Scaled(), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).eval()
    trunk = made(backbone, ("1",), x := torch.randn(2, 3, 4, 4), kind)
    backbone.load_state_dict({name: 2 * value for name, value in backbone.state_dict().items()})
    trunk.refresh()
    assert_same(trunk, backbone, ("1",), x)
