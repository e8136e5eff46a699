"""Bad input to networks and runners: each error names the argument, what it got and what it wants, in one line."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, make_runner, make_trunk
from auxhead.model.runners.table import EXITS
from support.example_models import SmallNet, plain_heads
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("without_interpreter")


def images(samples: int = 2) -> Tensor:
    return torch.randn(samples, 3, 8, 8)


def network(**options: object) -> EarlyExitNetwork:
    return EarlyExitNetwork(SmallNet().eval(), plain_heads(), 0.5, **options)


NO_BATCH: dict[str, tuple[object, type[Exception], str]] = {
    "list": ([images()], TypeError, "got list, wants a torch.Tensor [N, ...]"),
    "None": (None, TypeError, "got NoneType, wants a torch.Tensor [N, ...]"),
    "array": (images().numpy(), TypeError, "got ndarray, wants a torch.Tensor [N, ...]"),
    "dict": ({"x": 1.0}, TypeError, "got dict"),
    "number": (torch.tensor(1.0), ValueError, "got shape [], wants [N, ...]"),
    "empty": (images(0), ValueError, "got shape [0, 3, 8, 8], wants [N, ...] with at least one sample"),
    "sparse": (images().to_sparse(), TypeError, "got a torch.sparse_coo tensor, wants a dense one"),
    "opaque": (images().to_mkldnn(), TypeError, "got a torch._mkldnn tensor, wants a dense one"),
    "nested": (torch.nested.nested_tensor([*images()]), TypeError, "got a nested tensor, wants a dense one"),
}

CALLS: dict[str, tuple[str, Callable[[object], object]]] = {
    "first call": ("x", lambda x: network()(x)),
    "call": ("x", lambda x: network(example_input=images())(x)),
    "first logits": ("x", lambda x: network().logits(x)),
    "logits": ("x", lambda x: network(example_input=images()).logits(x)),
    "check_taps": ("example_input", lambda x: network().check_taps(x)),
    "example_input": ("example_input", lambda x: network(example_input=x)),
    "eager runner": ("x", lambda x: make_runner(network(), images(), exits="eager")(x)),
    "make_trunk": ("example_input", lambda x: make_trunk(SmallNet().eval(), SmallNet.taps, x)),
    **{
        f"make_runner {exits}": (
            "example_input",
            lambda x, exits=exits: make_runner(network(example_input=images()), x, exits=exits),
        )
        for exits in EXITS
    },
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_batch_is_refused_by_name(call: str) -> None:
    name, refuse = CALLS[call]
    for kind, (value, error, message) in NO_BATCH.items():
        if call == "example_input" and value is None:
            continue  # none given: the first batch serves
        if call in ("first call", "call", "first logits", "logits") and kind == "empty":
            continue  # see test_no_samples of test_early_exit_network
        with pytest.raises(error, match=f"^{name}: {re.escape(message)}") as caught:
            refuse(value)
        assert "\n" not in str(caught.value)


def test_a_refused_first_batch_leaves_the_network_unchecked() -> None:
    net = EarlyExitNetwork(SmallNet().eval(), {"block0": FusedAuxHead(None, 5)})
    with pytest.raises(ValueError, match="^x: got shape"):
        net(torch.tensor(1.0))
    assert isinstance(net.heads[0].linear, nn.LazyLinear)
    assert net(images(3)).label.shape == (3,) and net(images(0)).label.shape == (0,)


@pytest.mark.parametrize(
    ("backbone", "heads", "error", "message"),
    [
        ("resnet18", plain_heads(), TypeError, "backbone: got str, wants an nn.Module"),
        (SmallNet, plain_heads(), TypeError, "backbone: got the class SmallNet, wants an nn.Module"),
        (lambda x: x, plain_heads(), TypeError, "backbone: got function, wants an nn.Module"),
        (SmallNet(), None, TypeError, "heads: got NoneType, wants a dict of heads by the names of layers"),
        (SmallNet(), [FusedAuxHead(8, 5)], TypeError, "heads: got list, wants a dict of heads"),
        (SmallNet(), {0: FusedAuxHead(8, 5)}, TypeError, "heads: got int for a tap, wants the name of a layer, a str"),
        (
            SmallNet(),
            {("a", "b"): FusedAuxHead(8, 5)},
            TypeError,
            "heads: got tuple for a tap, wants the name of a layer, a str; a head reads one layer: where",
        ),
        (SmallNet(), {None: FusedAuxHead(8, 5)}, TypeError, "heads: got NoneType for a tap"),
        (SmallNet(), {nn.ReLU(): FusedAuxHead(8, 5)}, TypeError, "heads: got ReLU for a tap"),
        (SmallNet(), {"block0": FusedAuxHead}, TypeError, "heads['block0']: got the class FusedAuxHead, wants a Fused"),
    ],
    ids=["name", "class", "function", "no heads", "list", "number", "several layers", "none", "layer", "head class"],
)
def test_what_is_no_network_is_refused_by_name(
    backbone: object, heads: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}") as caught:
        EarlyExitNetwork(backbone, heads)
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_backbone_in_double_precision_on_a_gpu_is_told_what_heads_compute_in() -> None:
    x, backbone = images().double().cuda(), SmallNet().double().cuda()
    for head in (FusedAuxHead(None, 5), FusedAuxHead(8, 5), FusedAuxHead(8, 5, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"^heads: layer 'block0' returns .* of torch.float64") as caught:
            EarlyExitNetwork(backbone, {"block0": head}, example_input=x)
        said = str(caught.value)
        assert "wants one of torch.float32, torch.float16, torch.bfloat16" in said and ".float()" in said
        assert "torch.float64 works on the CPU alone" in said
        assert "would work" not in said  # none would


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_head_in_double_precision_on_a_gpu_is_told_what_heads_compute_in() -> None:
    head = nn.Sequential(nn.Flatten(), nn.Linear(8, 5)).double().cuda()
    with pytest.raises(ValueError, match=r"float64, wants one of torch.float32, .* on the CPU alone: call its \.float"):
        FusedAuxHead.from_module(head)


def test_a_head_of_another_float_than_its_backbone_is_refused() -> None:
    for backbone, head in ((SmallNet().double(), FusedAuxHead(8, 5)), (SmallNet(), FusedAuxHead(8, 5).double())):
        x = images().to(next(backbone.parameters()).dtype)
        with pytest.raises(ValueError, match=r"^heads\['block0'\]: is torch.float\d\d on cpu, wants torch.float\d\d"):
            EarlyExitNetwork(backbone, {"block0": head}, example_input=x)


PLAIN = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
BRANCH = nn.Sequential(nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


@pytest.mark.parametrize("head", [FusedAuxHead(8, 5), PLAIN, BRANCH], ids=["fused", "taken apart", "a module"])
def test_a_head_on_another_device_than_what_it_reads_is_told_to_go_there(head: nn.Module) -> None:
    """It is not moved: its tensors may be those of a module that others use."""
    network = EarlyExitNetwork(SmallNet(), {"block0": copy.deepcopy(head).to("meta")})
    with pytest.raises(
        ValueError, match=r"^heads\['block0'\]: its .* is on meta, wants cpu, .*\['block0'\].to\('cpu'\)"
    ):
        network.check_taps(images())
    assert all(parameter.is_meta for parameter in network.heads.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "head", [nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), nn.Identity()], ids=str
)
def test_a_rule_follows_what_its_head_was_made_of(head: nn.Module) -> None:
    """Layers that were moved by their owner, or have no parameters, leave the network's own rule where it was made."""
    backbone, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5)), torch.randn(2, 4)
    network = EarlyExitNetwork(backbone, {"0": head}).eval()
    head.cuda()
    backbone.cuda()
    assert network(x.cuda()).label.is_cuda and network.device.type == "cuda"


@pytest.mark.parametrize("wrapper", [nn.DataParallel, lambda net: network(example_input=images())], ids=["dp", "twice"])
def test_taps_of_a_wrapped_backbone_are_suggested_by_their_longer_names(wrapper: Callable) -> None:
    wrapped = wrapper(SmallNet().eval())
    inner = next(name for name, _ in wrapped.named_children())
    with pytest.raises(ValueError, match=f"no layer 'block0'; close to it: {inner}.block0"):
        EarlyExitNetwork(wrapped, {"block0": FusedAuxHead(None, 5)}, example_input=images())


def test_a_trunk_is_refused_by_the_name_of_its_argument() -> None:
    wants = "wants one of 'as_is', 'cudnn', 'branched', 'inductor'"
    for exits in EXITS:
        for trunk, got in (("cuda", "'cuda'"), (SmallNet(), "SmallNet")):
            with pytest.raises((ValueError, TypeError), match=f"^trunk: got {got}, {wants}"):
                make_runner(network(), images(), exits=exits, trunk=trunk)
    with pytest.raises(ValueError, match=f"^kind: got 'cuda', {wants}"):
        make_trunk(SmallNet(), [], images(), "cuda")


def test_taps_of_a_trunk_are_names_of_its_layers() -> None:
    for taps, error, message in (
        ("block0", TypeError, "taps: got 'block0', wants a sequence of names of layers"),
        (None, TypeError, "taps: got None, wants a sequence of names of layers"),
        (["blok0"], ValueError, "taps: the backbone has no layer 'blok0'; close to it: block0"),
    ):
        with pytest.raises(error, match=message):
            make_trunk(SmallNet(), taps, images())
    with pytest.raises(TypeError, match="backbone: got str, wants an nn.Module"):
        make_trunk("resnet18", [], images())
    with pytest.raises(RuntimeError, match="'block1' ran when 'block0' should|'block0' ran when 'block1' should"):
        make_trunk(SmallNet().eval(), ["block1", "block0"], images(), "cudnn")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_backbone_is_told_that_its_layers_are_out_of_reach() -> None:
    traced = torch.jit.trace(SmallNet().eval(), images())
    with pytest.raises(ValueError, match="^heads: layer 'block0' never runs .*: it is TorchScript.* nn.Module"):
        EarlyExitNetwork(traced, {"block0": FusedAuxHead(None, 5)}, example_input=images())
