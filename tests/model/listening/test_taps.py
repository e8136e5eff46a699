"""Taps and their dry run: refusals, suggested names that work, and no trace left on the network."""

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, attach
from auxhead.model.listening.dry_run import DryRun, dry_run
from auxhead.model.listening.taps import ForwardLeft, listening
from support.example_models import SmallNet, suggested
from support.interrupts import interrupted_at, lines_of
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

pytestmark = [
    pytest.mark.usefixtures("without_interpreter"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

X = (2, 3, 8, 8)


class Flow(nn.Module):
    """A backbone of which the test gives the forward."""

    def __init__(self, forward: Callable[["Flow", Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.flow = forward
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(4, 5)
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flow(self, x).mean((2, 3)))


class Returning(nn.Module):
    """A layer that returns whatever ``make`` makes of its input."""

    def __init__(self, make: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> object:
        return self.make(x)


def assert_refused(backbone: nn.Module, taps: list[str], x: Tensor, match: str, some: str = "conv") -> None:
    """The taps are refused, with names that every one work, among them ``some``."""
    with pytest.raises(ValueError, match=match) as caught:
        dry_run(backbone, taps, x)
    names = suggested(caught.value)
    assert some in names
    for name in names:
        run = dry_run(backbone, [name], x)
        assert 2 <= run.features[0].ndim <= 4
    assert_no_hooks(backbone)


def assert_no_hooks(module: nn.Module) -> None:
    for part in module.modules():
        assert not part._forward_hooks and not part._forward_pre_hooks


def straight(net: Flow, x: Tensor) -> Tensor:
    return net.relu(net.norm(net.conv(x)))


def test_a_good_tap_shows_its_features() -> None:
    net = Flow(straight).eval()
    x = torch.randn(X)
    run = dry_run(net, ["conv", "relu"], x)
    assert isinstance(run, DryRun)
    torch.testing.assert_close(run.features[0], net.conv(x))
    torch.testing.assert_close(run.logits, net(x))
    assert not run.logits.requires_grad


REFUSED: dict[str, tuple[Callable[[Flow, Tensor], Tensor], str, str, str]] = {
    "unknown": (straight, "convv", "no layer 'convv'.*close to it: conv", "conv"),
    "no name": (straight, "", "no layer ''", "conv"),
    "never": (lambda net, x: net.conv(x), "relu", "'relu' never runs", "conv"),
    "by its forward": (lambda net, x: net.conv.forward(x), "conv", "'conv' never runs", "fc"),
    "twice": (lambda net, x: net.relu(net.norm(net.relu(net.conv(x)))), "relu", "'relu' runs 2 times", "conv"),
    "twice by two names": (
        lambda net, x: net.norm(net.conv(x) + net.alias(x)), "alias", "'alias' runs 2 times", "norm"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_tap_that_runs_not_once_is_refused_with_names_that_work(case: str) -> None:
    forward, tap, match, some = REFUSED[case]
    net = Flow(forward)
    if case == "twice by two names":
        net.alias = net.conv
    assert_refused(net, [tap], torch.randn(X), match, some)


def test_a_layer_with_two_names() -> None:
    net = Flow(straight)
    net.alias = net.conv
    assert dry_run(net, ["alias"], torch.randn(X)).features[0].shape[1] == 4


def test_out_of_order() -> None:
    net = Flow(straight)
    with pytest.raises(ValueError, match=r"out of order.*\['conv', 'norm', 'relu'\]"):
        dry_run(net, ["norm", "relu", "conv"], torch.randn(X))
    dry_run(net, ["conv", "norm", "relu"], torch.randn(X))


@pytest.mark.parametrize(
    ("make", "unmake", "match"),
    [
        (lambda x: (x, x), lambda y: y[0], "tuple"),
        (lambda x: {"out": x}, lambda y: y["out"], "dict"),
        (lambda x: None, None, "NoneType"),
        (lambda x: x.to(torch.int64), lambda y: y.float(), "int64"),
        (lambda x: x > 0, lambda y: y.float(), "bool"),
        (lambda x: x.to(torch.complex64), lambda y: y.real, "complex64"),
        (lambda x: x[:, 0, 0, 0], lambda y: y.view(-1, 1, 1, 1), r"\[\d\]"),
        (lambda x: x[..., None], lambda y: y[..., 0], r"\[\d, 4, 8, 8, 1\]"),
        (lambda x: x.flatten(0, 1), lambda y: y.unflatten(0, (-1, 4)), r"\[\d+, 8, 8\]"),
        (lambda x: x[:, :0], None, "0"),
    ],
    ids=["tuple", "dict", "none", "int", "bool", "complex", "rank 1", "rank 5", "batch folded", "empty"],
)
def test_an_output_that_no_head_can_read(make: Callable, unmake: Callable | None, match: str) -> None:
    def flow(net: Flow, x: Tensor) -> Tensor:
        x = net.conv(x)
        y = net.odd(x)
        return x if unmake is None else x * 0 + unmake(y)

    assert_refused(Flow(flow, odd=Returning(make)), ["odd"], torch.randn(X), f"'odd' returns .*{match}")


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_an_output_without_a_batch_is_refused_at_once(batch: int) -> None:
    """A learned position embedding, say: [1, C, H, W] whatever the batch."""
    net = Flow(lambda net, x: net.conv(x) + net.odd(x), odd=Returning(lambda x: torch.zeros(1, 4, 8, 8)))
    with pytest.raises(ValueError, match="odd"):
        EarlyExitNetwork(net, {"odd": FusedAuxHead(4, 5)}, example_input=torch.randn(batch, 3, 8, 8))


def add_to(net: Flow, x: Tensor) -> Tensor:
    y = net.conv(x)
    y += 1
    return net.norm(y)


def relu_a_view(net: Flow, x: Tensor) -> Tensor:
    return net.norm(net.conv(x).view(-1, 4, 64).relu_().view(-1, 4, 8, 8))


def relu_a_detached(net: Flow, x: Tensor) -> Tensor:
    return net.norm(net.conv(x).detach().relu_())


def relu_the_data(net: Flow, x: Tensor) -> Tensor:
    y = net.conv(x)
    y.data.relu_()
    return net.norm(y)


def relu_in_inference_mode(net: Flow, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return net.norm(net.late(net.conv(x)))


def write_to_an_out_argument(net: Flow, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = net.conv(x)
        torch.clamp(y, min=0, out=y)
        return net.norm(y)


def write_a_slice(net: Flow, x: Tensor) -> Tensor:
    y = net.conv(x)
    y[:, 0] = 0
    return net.norm(y)


IN_PLACE = {
    "relu": lambda net, x: net.norm(net.late(net.conv(x))),
    "add": add_to,
    "of a view": relu_a_view,
    "of a detached": relu_a_detached,
    "of a slice": write_a_slice,
    "of its data": relu_the_data,
    "in an inference mode of its own": relu_in_inference_mode,
    "as an out argument": write_to_an_out_argument,
    "through an identity": lambda net, x: net.norm(nn.functional.relu_(net.same(net.conv(x)))),
}


@pytest.mark.parametrize(
    ("how", "mode"), list(zip(IN_PLACE, [torch.enable_grad, torch.no_grad, torch.inference_mode] * 3, strict=True))
)
def test_an_output_changed_in_place_later(how: str, mode: type) -> None:
    net = Flow(IN_PLACE[how], late=nn.ReLU(inplace=True), same=nn.Identity())
    with mode():
        assert_refused(net, ["conv"], torch.randn(X), "'conv' is changed in place", "norm")
        # where another tap is the bad one, conv must not be suggested either
        assert_refused(net, ["relu"], torch.randn(X), "'relu' never runs", "norm")


def test_the_layer_that_changes_in_place_may_be_tapped() -> None:
    net = Flow(IN_PLACE["relu"], late=nn.ReLU(inplace=True))
    dry_run(net, ["late"], torch.randn(X))


def test_many_layers_of_one_depth_are_still_listed() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(42))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    net, x = Deep(), torch.randn(2, 5)
    with pytest.raises(ValueError, match="'blocks' never runs") as caught:
        dry_run(net, ["blocks"], x)
    names = suggested(caught.value)
    assert "blocks.0" in names and len(dry_run(net, names, x).features) == len(names)  # every one works


@pytest.mark.parametrize(
    ("make", "match"),
    [(lambda x: (x,), "tuple"), (lambda x: x[0], r"\[5\]"), (lambda x: x[..., None], "5, 1"), (lambda x: {}, "dict")],
)
def test_a_backbone_that_returns_no_logits(make: Callable, match: str) -> None:
    net = nn.Sequential(nn.Linear(4, 5), Returning(make))
    with pytest.raises(ValueError, match=f"^backbone: returned .*{match}"):
        dry_run(net, ["0"], torch.randn(2, 4))


@pytest.mark.parametrize("good", [True, False])
def test_leaves_no_trace(good: bool) -> None:
    net = SmallNet()
    net.drop = nn.Dropout(0.5)
    net.block1.register_forward_hook(lambda m, i, y: net.drop(y))
    net.train()
    net.block1.eval()
    modes = {module: module.training for module in net.modules()}
    state = {name: value.clone() for name, value in net.state_dict().items()}
    hooks = {module: list(module._forward_hooks) for module in net.modules()}
    random = torch.get_rng_state()
    if good:
        dry_run(net, ["block1"], torch.randn(X, generator=torch.Generator()))
    else:
        with pytest.raises(RuntimeError):
            dry_run(net, ["block1"], torch.zeros(2, 7, 8, 8))
    assert {module: module.training for module in net.modules()} == modes
    assert {module: list(module._forward_hooks) for module in net.modules()} == hooks
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_leaves_its_example_alone() -> None:
    net = Flow(lambda net, x: net.conv(x.sub_(1.0)))
    x = torch.zeros(X)
    dry_run(net, ["conv"], x)
    assert not x.any()


def test_an_input_made_in_inference_mode() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Identity(), nn.Linear(12, 6), nn.Linear(6, 5))
    network = EarlyExitNetwork(net, {"2": FusedAuxHead(6, 5)})
    with torch.inference_mode():
        assert network(torch.randn(3, 3, 2, 2)).label.shape == (3,)


def test_a_backbone_with_keyword_arguments_and_one_in_a_wrapper() -> None:
    class Block(nn.Module):
        def forward(self, *, x: Tensor, scale: float) -> Tensor:
            return x * scale

    net = Flow(lambda net, x: net.block(x=net.conv(x), scale=2.0), block=Block())
    dry_run(net, ["conv", "block"], torch.randn(X))
    dry_run(nn.Sequential(nn.Sequential(net)), ["0.0.conv", "0.0.block"], torch.randn(X))


def test_listening_is_for_its_own_thread_and_only_while_open() -> None:
    net = SmallNet().eval()
    heard: list[int] = []
    with torch.no_grad(), listening(net, SmallNet.taps, lambda index, y: heard.append(index)):
        thread = threading.Thread(target=net, args=(torch.randn(X),))
        thread.start()
        thread.join()
        assert not heard
        net(torch.randn(X))
    assert heard == [0, 1, 2]
    net(torch.randn(X))
    assert heard == [0, 1, 2]
    assert_no_hooks(net)


@pytest.mark.parametrize("error", [ForwardLeft, RuntimeError, KeyboardInterrupt])
def test_an_error_while_listening_leaves_no_hooks(error: type[BaseException]) -> None:
    def fail(_place: int, _y: Tensor) -> None:
        raise error

    net = SmallNet().eval()
    with pytest.raises(error), listening(net, SmallNet.taps, fail):
        net(torch.randn(X))
    assert_no_hooks(net)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a __del__
def test_an_interrupt_while_listening_leaves_no_hooks() -> None:
    net = SmallNet()

    def call() -> None:
        with listening(net, SmallNet.taps, lambda _index, _features: None):
            net(torch.zeros(X))

    lines = lines_of(call, "model")
    for line in lines:
        interrupted_at(line, call, "model")
        assert not any(part._forward_hooks for part in net.modules()), line
    assert len(lines) > 10


def test_listening_at_a_layer_that_is_gone_leaves_no_hooks() -> None:
    net = SmallNet().eval()
    with pytest.raises(AttributeError), listening(net, ["block0", "nowhere"], lambda index, y: None):
        pass
    assert_no_hooks(net)


def test_a_dry_run_does_not_see_what_other_threads_run() -> None:
    """Who serves from the backbone meanwhile is no reason to refuse its taps."""
    backbone = SmallNet().eval()
    net = EarlyExitNetwork(backbone, {"block1": FusedAuxHead(None, 5)}, example_input=torch.randn(X))
    forward, seen = backbone.block1.forward, []

    def beside(x: Tensor) -> Tensor:
        if not seen:
            seen.append(threading.get_ident())
            other = threading.Thread(target=lambda: backbone(torch.randn(X)))
            other.start()
            other.join()
        return forward(x)

    backbone.block1.forward = beside
    assert dry_run(backbone, net.taps, torch.randn(X)).logits.shape == (2, 5)


def test_a_backbone_that_runs_in_inference_mode_can_be_tapped() -> None:
    class Inferring(SmallNet):
        @torch.inference_mode()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    net = EarlyExitNetwork(Inferring().eval(), {"block1": FusedAuxHead(None, 5)}, example_input=torch.randn(X))
    assert net(torch.randn(X)).label.shape == (2,)


class Sampled(nn.Module):
    """An encoder that leaves out what is padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, None].expand(-1, 3, -1)
        mask = torch.zeros(tokens.shape[:2], dtype=torch.bool)
        mask[:, -1] = True
        return self.encoder(tokens, src_key_padding_mask=mask).sum(1)


def sparse() -> list[nn.Module]:
    return [
        Returning(torch.Tensor.to_sparse),
        Returning(lambda x: x.mul_(2.0)),
        Returning(lambda x: x.to_dense().relu_()),
    ]


def opaque() -> list[nn.Module]:
    return [Returning(torch.Tensor.to_mkldnn), Returning(torch.relu_), Returning(lambda x: x.to_dense().mul_(2.0))]


def nested() -> list[nn.Module]:
    return [Sampled(), Returning(lambda x: x.relu_())]


def wrapped() -> list[nn.Module]:
    """As a DTensor is."""
    return [Returning(lambda x: TwoTensor(x, x.clone())), Returning(lambda x: x * 2), Returning(lambda x: x.a)]


@pytest.mark.parametrize("layers", [sparse, opaque, nested, wrapped])
def test_they_are_none_of_a_tap_s_business(layers: Callable[[], list[nn.Module]]) -> None:
    backbone, x = nn.Sequential(nn.Linear(8, 8), *layers(), nn.Linear(8, 5)).eval(), torch.randn(3, 8)
    net = EarlyExitNetwork(backbone, {"0": FusedAuxHead(8, 5, rule=0.25)}).eval()
    answer = net(x)
    with torch.no_grad():
        first, last = (torch.softmax(one, 1) for one in (net.heads[0].logits(backbone[0](x)), backbone(x)))
    torch.testing.assert_close(answer.probs, torch.where((first.amax(1) > 0.25)[:, None], first, last))


@pytest.mark.parametrize("layers", [sparse, opaque, nested, wrapped])
def test_they_are_refused_as_taps(layers: Callable[[], list[nn.Module]]) -> None:
    backbone = nn.Sequential(nn.Linear(8, 8), *layers(), nn.Linear(8, 5)).eval()
    tap = "1" if layers is not nested else "1.encoder.layers.0"
    for door in (
        lambda x: EarlyExitNetwork(backbone, {tap: FusedAuxHead(None, 5)}, example_input=x),
        lambda x: attach(backbone, [tap], example_input=x),
    ):
        with pytest.raises(ValueError, match=rf"heads: layer '{tap}' returns a .*(t|T)ensor, which a head cannot read"):
            door(torch.randn(3, 8))


@pytest.mark.parametrize("last", [torch.Tensor.to_sparse, lambda x: TwoTensor(x, x.clone())], ids=["sparse", "wrapped"])
def test_they_are_refused_as_logits(last: Callable[[Tensor], Tensor]) -> None:
    backbone = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5), Returning(last)).eval()
    with pytest.raises(ValueError, match="backbone: returned a .*ensor, wants logits"):
        EarlyExitNetwork(backbone, {"0": FusedAuxHead(8, 5)}, example_input=torch.randn(3, 8))


def test_graphs_refuse_parameters_whose_memory_is_not_what_they_are() -> None:
    """They read it as it is: numbers of the other sign, or from address 0."""
    head = FusedAuxHead(8, 5)
    assert head.as_exit_head().weight is head.linear.weight
    negated = torch.randn(5, 8, dtype=torch.complex64).conj().imag
    wrapped = TwoTensor(torch.randn(5, 8), torch.randn(5, 8))
    for name, value in (("weight", negated), ("weight", wrapped), ("bias", negated[:, 0])):
        other = copy.deepcopy(head)
        setattr(other.linear, name, nn.Parameter(value))
        with pytest.raises(ValueError, match=rf"^linear.{name}: .*, wants a plain tensor"):
            other.as_exit_head()
    head.linear.weight = nn.Parameter(negated)
    x = torch.randn(3, 8)
    torch.testing.assert_close(head(x).probs, torch.softmax(x @ negated.T + head.linear.bias, 1))
