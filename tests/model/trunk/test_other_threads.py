"""While a trunk is traced and timed, other threads call their modules, make trunks, and keep their settings.

PyTorch's tracer changes ``nn.Module`` for all threads at once, and ``cudnn.benchmark`` is one for all.
"""

import copy
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import pytest
import torch
from auxhead.model.listening.hooks import ThreadHook
from auxhead.model.listening.taps import listening
from auxhead.model.trunk import fused_convolution
from auxhead.model.trunk.timed_convolutions import LEAST_TIMED_BATCH, fastest_convolutions
from auxhead.model.trunk.trunk import _too_far_off, make_trunk
from support.example_models import SmallNet
from support.trunk_cases import assert_same, branching_inside
from torch import Tensor, nn

cudnn = torch.backends.cudnn
WAITS_S = 60
#: Files in which every line is watched: those that copy, and all of the trunk's.
WATCHED = {copy.__file__, nn.modules.module.__file__, *map(str, Path(fused_convolution.__file__).parent.glob("*.py"))}


class Meanwhile(nn.Module):
    """Calls ``act`` while a forward of it is traced, and twice a tensor's value otherwise."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            self.act()
        return x + x


class MeanwhileCompiled(Meanwhile):
    """Calls ``act`` while it is traced for a compiler, which takes it for a layer of PyTorch's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if type(x) is Tensor else self.act() or x)


MeanwhileCompiled.__module__ = "torch.nn"


def outcome(act: Callable[[], object]) -> object:
    """Return what a call returns or raises."""
    try:
        return act()
    except Exception as error:
        return error


def in_thread(act: Callable[[], object]) -> object:
    """Return what a call returns in a thread of its own."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(act()), daemon=True)
    thread.start()
    thread.join(WAITS_S)
    return results[0]


@pytest.mark.parametrize("whose", ["its own", "another"])
def test_a_module_is_called_while_another_thread_traces(whose: str) -> None:
    x, answers = torch.randn(2, 3, 12, 12), []
    network = SmallNet().eval()
    called = network if whose == "its own" else SmallNet().eval()
    backbone = nn.Sequential(Meanwhile(lambda: answers.append(in_thread(lambda: called(x)))), network).eval()
    taps = [f"1.{tap}" for tap in SmallNet.taps]
    trunk = make_trunk(backbone, taps, x, "cudnn")
    assert answers and all(torch.equal(answer, called(x)) for answer in answers)
    assert not any("as it is" in note for note in trunk.notes), trunk.notes
    assert_same(trunk, backbone, taps, x)


@pytest.mark.parametrize(
    ("kind", "layer"), [("cudnn", Meanwhile), ("inductor", MeanwhileCompiled)], ids=["cudnn", "inductor"]
)
def test_a_trunk_is_made_while_another_thread_makes_one(kind: str, layer: type[Meanwhile], monkeypatch) -> None:
    """The second would begin within the first, and end after it."""
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    x, taps = torch.randn(2, 3, 12, 12), [f"1.{tap}" for tap in SmallNet.taps]
    began, ended = threading.Event(), threading.Event()
    trunks = {}

    def act() -> None:
        began.set()
        ended.wait(3)  # in vain, if it has the lock between two parts of the first

    second = nn.Sequential(layer(act), SmallNet()).eval()
    thread = threading.Thread(target=lambda: trunks.update(second=make_trunk(second, taps, x, kind)), daemon=True)

    def start() -> None:
        thread.start()
        began.wait(1)  # in vain, if the second waits for the first

    first = nn.Sequential(layer(start), SmallNet()).eval()
    before = nn.Module.__call__, nn.Module.__getattr__, torch.fx._symbolic_trace.is_fx_symbolic_tracing()
    trunks["first"] = make_trunk(first, taps, x, kind)
    ended.set()
    thread.join(WAITS_S)
    assert before == (nn.Module.__call__, nn.Module.__getattr__, torch.fx._symbolic_trace.is_fx_symbolic_tracing())
    for backbone, trunk in ((first, trunks["first"]), (second, trunks["second"])):
        assert not any("as it is" in note for note in trunk.notes), trunk.notes
        assert_same(trunk, backbone, taps, x)


def test_a_trunk_answers_while_another_thread_compiles_it_for_a_new_size(monkeypatch) -> None:
    """The layers that are traced are not those that run."""
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    answers: list[object] = []

    def ask() -> None:
        thread = threading.Thread(target=lambda: answers.append(outcome(lambda: trunk.module(torch.ones(3, 4)))))
        thread.start()
        thread.join(0.2 * WAITS_S)

    meanwhile = MeanwhileCompiled(lambda: None)
    backbone = nn.Sequential(nn.Linear(4, 4), meanwhile, nn.Linear(4, 3)).eval()
    trunk = make_trunk(backbone, [], torch.ones(2, 4), "inductor")
    trunk.module(torch.ones(3, 4))
    for layer in trunk.module.modules():
        if isinstance(layer, Meanwhile):
            layer.act = ask
    trunk.module(torch.ones(5, 4))
    expected = backbone[:2](torch.ones(3, 4))  # its last layer is a fused head
    assert answers and all(torch.allclose(answer, expected) for answer in answers)


@pytest.mark.parametrize("kind", [SmallNet, branching_inside], ids=["traced", "in parts"])
def test_a_trunk_is_made_while_another_thread_listens(kind: Callable[[], nn.Module]) -> None:
    """Its hooks stay out of the trunk, which would call them for good."""
    x, backbone = torch.randn(2, 3, 12, 12), kind().eval()
    taps = SmallNet.taps if kind is SmallNet else ("1.layers.0", "1.layers.1")
    listens, made = threading.Event(), threading.Event()
    trunks, heard = [], []

    def listen() -> None:
        with listening(backbone, taps, lambda index, _features: heard.append(index)):
            listens.set()
            made.wait(WAITS_S)
            trunks[0].module(x)
            trunks[0].module(x)
            copy.deepcopy(backbone)(x)
            assert not heard
            backbone(x)

    alone = make_trunk(backbone, taps, x, "cudnn")
    thread = threading.Thread(target=lambda: trunks.append(outcome(listen)), daemon=True)
    thread.start()
    listens.wait(WAITS_S)
    trunks.append(make_trunk(backbone, taps, x, "cudnn"))
    made.set()
    thread.join(WAITS_S)
    assert trunks[1] is None and heard == [*range(len(taps))], trunks[1]
    assert trunks[0].notes == alone.notes


@pytest.mark.parametrize("kind", ["cudnn", "inductor"])
def test_hooks_of_another_thread_come_and_go_at_every_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, backbone = torch.randn(2, 3, 12, 12), SmallNet().eval()
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    alone = make_trunk(backbone, SmallNet.taps, x, kind)
    hook = in_thread(lambda: ThreadHook(print))
    layers, handles = list(backbone.modules()), []

    def at_line(_frame: FrameType, event: str, _arg: object) -> object:
        if event == "line" and handles:
            handles.pop().remove()
            layers.append(layers.pop(0))
        elif event == "line":
            handles.append(layers[0].register_forward_hook(hook))
        return at_line

    def at_call(frame: FrameType, _event: str, _arg: object) -> object:
        return at_line if frame.f_code.co_filename in WATCHED else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        trunk = make_trunk(backbone, SmallNet.taps, x, kind)
    finally:
        sys.settrace(before)
    assert trunk.notes == alone.notes
    assert_same(trunk, backbone, SmallNet.taps, x)


@torch.no_grad()
def test_the_truth_is_computed_while_another_thread_listens() -> None:
    """It listens while the hooks of a layer are copied."""
    x, backbone = torch.randn(2, 3, 12, 12), SmallNet().eval()

    class Hook:
        def __call__(self, *_args: object) -> None:
            pass

        def __deepcopy__(self, memo: object) -> "Hook":
            backbone.block0.register_forward_hook(Hook())
            return self

    for _ in range(2):
        backbone.block0.register_forward_hook(Hook())
    logits = backbone(x)
    off = 2**-8 * logits.abs().max()
    assert _too_far_off(backbone, [], x, [logits + off], [[logits + 2 * off]]) is None  # of the truth: not of the first
    assert len(backbone.block0._forward_hooks) > 2


@pytest.mark.parametrize("before", [False, True])
def test_the_setting_that_two_threads_change_is_put_back(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ends before the second: each on a stack of its own, as in two threads."""
    monkeypatch.setattr(cudnn, "benchmark", before)
    first, second = ExitStack(), ExitStack()
    first.enter_context(fastest_convolutions(LEAST_TIMED_BATCH))
    second.enter_context(fastest_convolutions(LEAST_TIMED_BATCH))
    first.close()
    assert cudnn.benchmark  # the second is not done
    second.close()
    assert cudnn.benchmark is before
