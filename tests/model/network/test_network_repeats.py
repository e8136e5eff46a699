"""eager_pass.py: a network's exits in repeated launches answer as its heads do one by one, whatever has changed.

Launches are interpreted, or on a GPU; see test_network_repeats_gpu.py for streams, graphs and threads.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from auxhead.kernels import HeadOutput, runs_triton
from auxhead.model import EagerRunner, EarlyExitNetwork, ExitResult, ExitRule, FusedAuxHead
from auxhead.model.listening.taps import listening
from auxhead.model.network.exits_repeat import _Told
from support.exits_plan_cases import (
    CLASSES,
    TAPS,
    as_on_a_gpu,
    assert_same,
    differ,
    heads_called,
    make_network,
    unplanned,
)
from support.exits_plan_cases import images as few_images
from support.head_plan_cases import CHANGES
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("without_interpreter", "poisoned_empty", "without_gradients")


class Where:
    """The device of the test that runs."""

    device = "cpu"


@pytest.fixture(params=["triton", *([pytest.param("cuda", marks=pytest.mark.gpu)] * torch.cuda.is_available())])
def where(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "triton" and not runs_triton(torch.empty(0)):
        pytest.skip("kernels are not interpreted here")
    Where.device = "cuda" if request.param == "cuda" else "cpu"
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield
    Where.device = "cpu"


@pytest.fixture
def net(where: None) -> EarlyExitNetwork:
    return make_network(Where.device)


def images(samples: int, side: int = 4) -> Tensor:
    return few_images(samples, side).to(Where.device)


def launching(handle: int = 0) -> AbstractContextManager[None]:
    """Let eager passes launch, on the CPU too, on a stream of that handle there."""
    return nullcontext() if Where.device == "cuda" else as_on_a_gpu(handle)


def planned(net: EarlyExitNetwork, x: Tensor, *, stop: bool = False, handle: int = 0) -> ExitResult:
    """The answer of planned launches alone."""
    with launching(handle), heads_called() as called:
        result = net(x, stop=stop)
    assert not called, "heads were called one by one"
    return result


def follows(net: EarlyExitNetwork, *batches: Tensor, again: int = 2) -> None:
    """Assert that each batch, again and again, gets what heads that are called one by one say now."""
    for _ in range(again):
        for x in batches:
            wanted = unplanned(net, x)
            for stop in (False, True):
                with launching():
                    assert_same(net(x, stop=stop), wanted)


stops = pytest.mark.parametrize("stop", [False, True], ids=["all run", "stop"])


@stops
@pytest.mark.parametrize("samples", [1, 3, 8])
def test_each_sample_gets_the_answer_of_its_exit(net: EarlyExitNetwork, samples: int, stop: bool) -> None:
    exits = set()
    for start in range(0, 9 - samples, samples):
        x = images(8)[start : start + samples]
        wanted = unplanned(net, x)
        for _ in range(2):
            assert_same(planned(net, x, stop=stop), wanted)
        if start == 0:
            assert_same(EagerRunner(net)(x, stop=stop), wanted)
        exits.update(wanted.exit_index.tolist())
    assert exits == {0, 1, 2, 3} or samples == 3


@stops
def test_each_head_decides_by_its_own_criterion(net: EarlyExitNetwork, stop: bool) -> None:
    for head, criterion in zip(net.fused_heads, ("entropy", "margin", "energy"), strict=True):
        head.rule.assign(ExitRule(criterion=criterion))
    x = images(8)
    with torch.no_grad():
        said = [head(y) for head, y in zip(net.fused_heads, features_of(net, x), strict=True)]
    for head, out in zip(net.fused_heads, said, strict=True):  # two leave at each
        head.rule.threshold = out.confidence.sort().values[-3:-1].mean().item()
    wanted = unplanned(net, x)
    assert set(wanted.exit_index.tolist()) == {0, 1, 2, 3}
    for _ in range(2):
        assert_same(planned(net, x, stop=stop), wanted)
    at = wanted.exit_index == 2
    assert torch.equal(wanted.confidence[at], said[2].confidence[at]), "an energy"


@pytest.mark.parametrize("index", range(4))
def test_the_forward_is_left_once_all_are_sure(net: EarlyExitNetwork, index: int) -> None:
    for place, head in enumerate(net.fused_heads):
        head.rule.threshold = 0.0 if place == index else 1.0
    ran: list[str] = []
    for name in (*TAPS, "fc"):
        net.backbone.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    for samples in (3, 3, 1):
        wanted = unplanned(net, images(samples))
        ran.clear()
        result = planned(net, images(samples), stop=True)
        assert ran == [*TAPS, "fc"][: index + 1]
        assert_same(result, wanted)
        assert result.exit_index.tolist() == [index] * samples


def test_threads_of_one_stream_are_told_each_in_memory_of_its_own() -> None:
    """Between the copy of one and its look at it another may copy: no more than the stream keeps them apart."""
    told = _Told(3, torch.device("cpu"))
    with ThreadPoolExecutor(1) as another:
        others = another.submit(lambda: told.exit_index.data_ptr()).result()
    assert others != told.exit_index.data_ptr() == told.numbers.__array_interface__["data"][0]


def test_answers_share_no_memory(net: EarlyExitNetwork) -> None:
    batches = [images(8)[:3], images(8)[3:6], images(8)[5:]]
    wanted = [unplanned(net, x) for x in batches]
    found = [planned(net, x) for x in batches]
    found[1].label.fill_(77)
    found[1].probs.fill_(7.0)
    planned(net, batches[1])
    assert_same(found[0], wanted[0])
    assert_same(found[2], wanted[2])
    assert torch.equal(found[1].confidence, planned(net, batches[1]).confidence)


def test_logits_that_are_not_finite(net: EarlyExitNetwork) -> None:
    x = images(8)
    x[1], x[4, 0, 0, 0], x[6] = torch.nan, torch.inf, 1e30  # not 1e38, whose sums overflow or not by their order
    wanted = unplanned(net, x)
    for _ in range(2):
        found = planned(net, x)
        assert found.exit_index.tolist() == wanted.exit_index.tolist() and torch.equal(found.label, wanted.label)
        torch.testing.assert_close(found.probs, wanted.probs, equal_nan=True)
        torch.testing.assert_close(found.confidence, wanted.confidence, equal_nan=True)
    assert wanted.confidence.isnan().any()


def features_of(net: EarlyExitNetwork, x: Tensor) -> list[Tensor]:
    found: list[Tensor] = []
    with listening(net.backbone, net.taps, lambda _index, y: found.append(y)):
        net.backbone(x)
    return found


# What repeats rest on


#: One of each kind of what repeats of a head look at, all of which test_head_repeats.py changes.
OF_A_HEAD = (
    "logits", "step of an optimizer", "data of the bias", "weight lazily negated where it lies", "no bias",
    "another linear layer", "threshold", "criterion", "another rule", "threshold in device memory", "pool_size",
    "return_probs", "hook", "forward", "class", "pruned",
)  # fmt: skip


@pytest.mark.parametrize("change", OF_A_HEAD)
def test_a_change_of_a_head_is_followed(net: EarlyExitNetwork, change: str) -> None:
    """In launches for all exits; those for each look at the same, see below."""
    x, head = images(2), net.fused_heads[0]
    head.rule.assign(ExitRule(0.7, temperature=0.7))
    before = unplanned(net, x)
    planned(net, x)
    CHANGES[change](head)
    with launching():
        found = [net(x), net(x)]
    wanted = unplanned(net, x)
    for one in found:
        assert_same(one, wanted)
    assert differ(before, wanted), "the change is to show"


def _replace_a_head(net: EarlyExitNetwork) -> None:
    net.heads[0] = make_network(Where.device).fused_heads[1]
    net.heads[0].rule.threshold = 0.3


def _replace_all_heads(net: EarlyExitNetwork) -> None:
    other = make_network(Where.device)
    for head in other.fused_heads:
        head.linear.weight.neg_()
    net.heads = other.heads


OF_A_NETWORK: dict[str, Callable[[EarlyExitNetwork], object]] = {
    "a head": _replace_a_head,
    "all heads": _replace_all_heads,
    "heads in another order": lambda net: setattr(net, "heads", nn.ModuleList([*net.heads][::-1])),
    "thresholds": lambda net: net.set_rules(0.0),
    "rules": lambda net: net.set_rules({"first": ExitRule(0.2, temperature=3.0), "third": ExitRule(enabled=False)}),
    "the backbone's parameters": lambda net: net.backbone.first.weight.neg_(),
    "memory": lambda net: net.to("cpu").to(Where.device).apply(_negate),
    "the backbone": lambda net: setattr(net, "backbone", make_network(Where.device).backbone.apply(_negate)),
    "dtype": lambda net: net.bfloat16(),
    "state": lambda net: net.load_state_dict(
        {name: -value for name, value in net.state_dict().items() if "rule" not in name}, strict=False
    ),
}  # fmt: skip


def _negate(layer: nn.Module) -> None:
    for parameter in layer.parameters(recurse=False):
        parameter.neg_()


@pytest.mark.filterwarnings("ignore:state_dict. has no exit rules")
@pytest.mark.parametrize("change", OF_A_NETWORK.values(), ids=OF_A_NETWORK)
def test_a_change_of_the_network_is_followed(
    net: EarlyExitNetwork, change: Callable[[EarlyExitNetwork], object]
) -> None:
    x = images(2)
    before = unplanned(net, x)
    for stop in (False, True):
        planned(net, x, stop=stop)
    change(net)
    x = x.to(net.backbone.fc.weight.dtype)
    wanted = unplanned(net, x)
    assert differ(before, wanted), "the change is to show"
    for stop in (False, True, False, True):
        assert_same(planned(net, x, stop=stop), wanted)


def test_batches_of_many_layouts_in_turn(net: EarlyExitNetwork) -> None:
    x = images(3)
    follows(
        net, x, x[:1], x.contiguous(memory_format=torch.channels_last), x[1:].transpose(2, 3),
        x[:1].expand(4, -1, -1, -1), images(2, side=5), torch._neg_view(x[1:]), x[:0],
    )  # fmt: skip


def test_other_streams_have_other_repeats(net: EarlyExitNetwork) -> None:
    x = images(3)
    wanted = unplanned(net, x)
    for handle in (0, 11, 0, 12, 11):
        assert_same(planned(net, x, handle=handle), wanted)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda net: pickle.loads(pickle.dumps(net))}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_answers_for_itself(net: EarlyExitNetwork, copied: Callable) -> None:
    x = images(3)
    wanted = planned(net, x)
    other = copied(net)
    assert_same(planned(other, x), wanted)
    _replace_all_heads(other)
    other.set_rules(0.1)
    assert_same(planned(other, x), unplanned(other, x))
    assert_same(planned(net, x), wanted)
    net.fused_heads[1].linear.weight.neg_()
    assert_same(planned(other, x), unplanned(other, x))


def test_what_was_replaced_is_let_go_of(net: EarlyExitNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("auxhead.model.heads.repeats._MOST", 2)
    planned(net, images(2))
    old = weakref.ref(net.fused_heads[0].linear.weight)
    net.fused_heads[0].linear = nn.Linear(8, CLASSES, device=Where.device)
    for samples in (1, 3, 4):
        planned(net, images(samples))
    gc.collect()
    assert old() is None, "repeats are kept for good"


# Heads that are called one by one


class _Flipped(FusedAuxHead):
    """A user's head that answers otherwise."""

    def forward(self, x: Tensor) -> HeadOutput:
        return super().forward(-x)


def test_heads_with_a_forward_of_their_own_are_called(net: EarlyExitNetwork) -> None:
    x = images(3)
    before = unplanned(net, x)
    planned(net, x)
    net.fused_heads[0].__class__ = _Flipped
    wanted = unplanned(net, x)
    assert differ(before, wanted)
    follows(net, x)


def test_hooks_of_heads_are_called(net: EarlyExitNetwork) -> None:
    x = images(2)
    planned(net, x)
    said: list[HeadOutput] = []
    handle = net.heads[1].register_forward_hook(lambda _head, _inputs, output: said.append(output))
    with launching():
        net(x)
    assert len(said) == 1
    handle.remove()
    planned(net, x)
    changing = net.heads[0].register_forward_pre_hook(lambda _head, inputs: (-inputs[0],))
    follows(net, x)
    changing.remove()
    follows(net, x)


@pytest.mark.parametrize("layer", ["third", "fc"])
def test_outputs_that_are_wrapped(net: EarlyExitNetwork, layer: str) -> None:
    """They have other tensors instead of memory."""
    x = images(3)
    planned(net, x)
    hooked = net.backbone.get_submodule(layer)
    handle = hooked.register_forward_hook(lambda _layer, _inputs, y: TwoTensor(y, y.clone()))
    wanted = unplanned(net, x)
    for stop in (False, True):
        with launching():
            found = net(x, stop=stop)
        for one, other in zip(found, wanted, strict=True):
            assert type(one) is type(other)
            torch.testing.assert_close(getattr(one, "a", one), getattr(other, "a", other))
    handle.remove()
    follows(net, x)


@pytest.mark.parametrize("layer, stop", [("third", True), ("fc", False), ("fc", True)])
def test_outputs_on_another_device_are_refused(net: EarlyExitNetwork, layer: str, stop: bool) -> None:
    """Whose memory a launch could not reach, before plans are made and after."""
    x = images(3)
    for _ in range(2):
        handle = net.backbone.get_submodule(layer).register_forward_hook(lambda _layer, _inputs, y: y.to("meta"))
        with launching(), pytest.raises(ValueError, match=f"on meta, wants {Where.device}"):
            net(x, stop=stop)
        handle.remove()
        planned(net, x, stop=stop)


@pytest.mark.parametrize("of", ["tap", "logits"])
def test_outputs_that_are_lazily_negated(net: EarlyExitNetwork, of: str) -> None:
    layer = net.backbone.second if of == "tap" else net.backbone.fc
    layer.register_forward_hook(lambda _layer, _inputs, y: torch._neg_view(y))
    follows(net, images(3))


def test_autocast_and_modes_see_heads_one_by_one(net: EarlyExitNetwork) -> None:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, seen = images(3), []
    plain = planned(net, x)
    with torch.autocast(Where.device, torch.bfloat16):
        wanted = unplanned(net, x)
        with launching(), heads_called() as called:
            assert_same(net(x), wanted)
    assert len(called) == 3
    with Watching(), launching():
        net(x)
    assert sum("auxhead.fused_head" in name for name in seen) == 3
    assert_same(planned(net, x), plain)


# Errors


@stops
@pytest.mark.parametrize("layer", ["first", "third", "fc"])
def test_an_error_in_the_backbone_leaves_no_hooks(net: EarlyExitNetwork, layer: str, stop: bool) -> None:
    error: type[BaseException] = KeyboardInterrupt if stop else ZeroDivisionError
    net.set_rules(1.0)
    x = images(3)
    wanted = planned(net, x, stop=stop)

    def fail(*_: object) -> None:
        raise error

    before = [dict(one._forward_hooks) for one in net.modules()]
    handle = net.backbone.get_submodule(layer).register_forward_pre_hook(fail)
    with launching(), pytest.raises(error):
        net(x, stop=stop)
    handle.remove()
    assert [dict(one._forward_hooks) for one in net.modules()] == before
    assert_same(planned(net, x, stop=stop), wanted)


def test_a_backbone_that_changes_is_refused_and_forgotten(net: EarlyExitNetwork) -> None:
    x = images(3)
    wanted = planned(net, x)
    for wrong, message in (
        (lambda y: y[:, :5], "logits are .* wants floats"),
        (lambda y: y[:2], "wants 3 samples"),
        (lambda y: y.argmax(1), "logits are .* wants floats"),
    ):
        handle = net.backbone.fc.register_forward_hook(lambda _layer, _inputs, y, wrong=wrong: wrong(y))
        with launching(), pytest.raises(ValueError, match=message):
            net(x)
        handle.remove()
    handle = net.backbone.first.register_forward_hook(lambda _layer, _inputs, y: y.double())
    with launching(), pytest.raises((TypeError, RuntimeError)):
        net(x)
    handle.remove()
    assert_same(planned(net, x), wanted)


@pytest.mark.usefixtures("not_by_one_launch")
def test_heads_of_more_than_a_launch(net: EarlyExitNetwork) -> None:
    """Logits or features are computed anew for each batch, and by the parameters as they are then."""
    follows(net, images(3), images(8)[3:6], images(3, side=6))
    net.fused_heads[1].linear.weight.data.mul_(-0.5)
    follows(net, images(3), images(8)[3:6])


@pytest.mark.usefixtures("not_by_one_launch")
def test_answers_of_heads_of_more_than_a_launch_are_let_go(net: EarlyExitNetwork) -> None:
    """Launches are kept for what comes before in later batches, but not with the memory of the first one's answer."""
    answers = []
    for stop in (False, True):
        answers += [StorageWeakRef(planned(net, images(3), stop=stop).label.untyped_storage()) for _ in range(2)]
    gc.collect()
    assert all(one.expired() for one in answers)
