"""repeats.py: whoever follows or changes operations sees the operator's, also where a head has repeats."""

import copy
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import pytest
import torch
from auxhead.kernels import HeadOutput
from auxhead.kernels.launch.choose_config import overriding
from auxhead.kernels.launch.residency import recording
from auxhead.model import ExitRule, FusedAuxHead
from support.head_cases import assert_same_bits
from support.head_plan_cases import counting, differ, follows, make_head, make_input
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("without_interpreter")


@pytest.fixture
def head() -> FusedAuxHead:
    return make_head()


@pytest.fixture
def x(head: FusedAuxHead) -> Tensor:
    """An input of which the head has a plan."""
    x = make_input(head)
    follows(head, x)
    with torch.no_grad(), counting(head) as calls:
        head(x)
    assert not calls
    return x


@pytest.mark.parametrize("of", ["x", "weight", "bias"])
def test_gradients_are_those_of_the_operator(head: FusedAuxHead, x: Tensor, of: str) -> None:
    """Of one leaf at a time, since any of them is reason enough."""
    head.requires_grad_(False)
    follows(head, x)  # a plan, made while nothing wants a gradient
    leaf = x.requires_grad_() if of == "x" else getattr(head.linear, of).requires_grad_()
    gradients = []
    for call in (head, head._call):
        answer = call(x)
        assert answer.probs.requires_grad and answer.confidence.requires_grad and not answer.label.requires_grad
        (of_probs,) = torch.autograd.grad(answer.probs.square().sum(), leaf, retain_graph=True)
        (of_both,) = torch.autograd.grad((answer.confidence + answer.probs[:, 0]).sum(), leaf)
        gradients.append((of_probs, of_both))
    assert all(torch.equal(one, other) and one.any() for one, other in zip(*gradients, strict=True))
    with torch.no_grad():
        assert not head(x).probs.requires_grad
    leaf.requires_grad_(False)
    assert not head(x).probs.requires_grad


def test_second_derivatives(head: FusedAuxHead, x: Tensor) -> None:
    x.requires_grad_()
    found = []
    for call in (head, head._call):
        (first,) = torch.autograd.grad(call(x).confidence.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), head.linear.weight)[0])
    assert torch.equal(*found) and found[0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_between_plain_calls(head: FusedAuxHead, x: Tensor, dtype: torch.dtype) -> None:
    with torch.no_grad():
        plain = head(x)
        half = x.to(dtype)
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                wanted = head._call(half)
                assert_same_bits(head(half), wanted)
                assert_same_bits(head(x), head._call(x))
                with torch.autocast("cpu", enabled=False):
                    assert_same_bits(head(x), plain)
            assert_same_bits(head(x), plain)
            with pytest.raises(TypeError, match="weight: got torch.float32"):
                head(half)


def test_vmap_grad_and_forward_mode_derivatives(head: FusedAuxHead, x: Tensor) -> None:
    batches, direction = torch.stack([x, x.flip(0), -x]), torch.randn_like(x)
    head.requires_grad_(False)

    def probs(call: Callable[[Tensor], HeadOutput]) -> Callable[[Tensor], Tensor]:
        return lambda t: call(t).probs

    def top(call: Callable[[Tensor], HeadOutput]) -> Callable[[Tensor], Tensor]:
        return lambda t: call(t).confidence.sum()

    def tangent(call: Callable[[Tensor], HeadOutput]) -> Tensor:
        with torch.no_grad(), forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(x, direction)).probs).tangent

    for transform in (
        tangent,
        lambda call: vmap(probs(call))(batches),
        lambda call: grad(top(call))(x),
        lambda call: vmap(grad(top(call)))(batches),
        lambda call: torch.stack(jvp(probs(call), (x,), (direction,))),
        lambda call: torch.func.functionalize(probs(call))(x),
    ):
        found, wanted = transform(head), transform(head._call)
        assert torch.equal(found, wanted) and found.any()
    follows(head, x)


def test_other_parameters_for_one_call(head: FusedAuxHead, x: Tensor) -> None:
    plain = head(x)
    other = {name: -value for name, value in head.named_parameters()}
    for _ in range(3):
        found = functional_call(head, other, (x,))
        assert differ(found, plain)
        with parametrize.cached(), torch.no_grad():
            assert_same_bits(head(x), plain)
        twin = copy.deepcopy(head)
        twin.load_state_dict({**head.state_dict(), **other})
        assert_same_bits(found, twin(x))


# Modes, subclasses and tracers


class _Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_Dispatched, _Called])
def test_a_mode_sees_the_operator(mode: type[_Dispatched], head: FusedAuxHead, x: Tensor) -> None:
    with torch.no_grad():
        for _ in range(2):
            with mode() as watching:
                head(x)
            assert any("auxhead" in name and "fused_head" in name for name in watching.seen), watching.seen
        follows(head, x)


class _Noting(Tensor):
    """Notes what functions it is given to."""

    seen: list[str] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("of", ["x", "weight"])
def test_a_tensor_subclass_sees_the_operator(head: FusedAuxHead, x: Tensor, of: str) -> None:
    with torch.no_grad():
        plain = head(x)
        if of == "x":
            given = x.as_subclass(_Noting)
        else:
            given, head.linear.weight = x, nn.Parameter(head.linear.weight.detach().as_subclass(_Noting))
        for _ in range(3):
            _Noting.seen.clear()
            found = head(given)
            assert any("fused_head" in name for name in _Noting.seen), _Noting.seen
            assert type(found.probs) is _Noting
            assert torch.equal(found.probs.as_subclass(Tensor), plain.probs)


def test_a_head_is_compiled_whole_whatever_plans_it_has(head: FusedAuxHead, x: Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(head, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert_same_bits(compiled(x), head(x))
        head.linear.weight.neg_()
        head.rule.threshold = 0.0
        found = compiled(x)
        assert_same_bits(found, head._call(x))
        assert_same_bits(found, head(x))


def test_traces_and_exported_programs_hold_the_operator(head: FusedAuxHead, x: Tensor) -> None:
    head.requires_grad_(False)
    other = make_input(head)
    traced = torch.jit.trace(lambda t: tuple(head(t)), (x,), check_trace=False)
    for one, part in zip(traced(other), head._call(other), strict=True):
        assert torch.equal(one, part)
    assert "auxhead::fused_head" in str(traced.graph)
    exported = torch.export.export(head, (x,))
    assert "auxhead.fused_head" in str(exported.graph)
    assert_same_bits(exported.module()(x), head(x))


@contextmanager
def profiled_by_triton() -> Iterator[None]:
    """As Proton does."""
    knobs = pytest.importorskip("triton").knobs.runtime

    def hook(_metadata: Any) -> None:
        pass

    knobs.launch_enter_hook.add(hook)
    try:
        yield
    finally:
        knobs.launch_enter_hook.remove(hook)


@pytest.mark.parametrize("looking", [lambda: overriding({}), recording, profiled_by_triton])
def test_who_looks_at_launches_sees_the_operator(head: FusedAuxHead, x: Tensor, looking: Callable) -> None:
    with torch.no_grad(), looking():
        with counting(head) as calls:
            head(x)
            head(x)
        assert len(calls) == 2
    follows(head, x)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda head: pickle.loads(pickle.dumps(head)),
    "copy": copy.copy,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_have_answers_of_their_own(head: FusedAuxHead, x: Tensor, copied: Callable) -> None:
    other = copied(head)
    follows(other, x)
    other.pool, other.return_probs = "max", False
    for _ in range(2):
        follows(other, x)
        follows(head, x)
    assert head(x).probs is not None and other(x).probs is None
    if copied is copy.copy:
        return  # shares all modules
    with torch.no_grad():
        other.linear.weight.neg_()
    other.rule.assign(ExitRule(0.0, temperature=4.0))
    follows(head, x)
    follows(other, x)
    head.linear = nn.Linear(8, 8)
    follows(head, x)
    follows(other, x)


def test_threads_call_one_head_at_once(head: FusedAuxHead) -> None:
    """More layouts than there are plans, so that they are forgotten all the while."""
    inputs = [make_input(head, (1 + index, 2, 2, 2 + index)) for index in range(24)]
    start = Barrier(4)
    with torch.no_grad():
        wanted = [head._call(x) for x in inputs]

    def work(thread: int) -> None:
        start.wait()
        with torch.no_grad():
            for turn in range(120):
                index = (turn * (2 * thread + 1) // 3) % len(inputs)
                assert_same_bits(head(inputs[index]), wanted[index])

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, thread) for thread in range(4)]:
            done.result()


def test_one_thread_calls_while_another_changes_the_rule(head: FusedAuxHead, x: Tensor) -> None:
    """Each answer is that of one of the rules."""
    right = []
    with torch.no_grad():
        for threshold in (0.0, 1.0):
            head.rule.threshold = threshold
            right.append(head._call(x).exit.tolist())
    assert right[0] != right[1]
    over: list[None] = []

    def work() -> set[tuple[bool, ...]]:
        found = set()
        with torch.no_grad():
            while not over:
                found.add(tuple(head(x).exit.tolist()))
        return found

    with ThreadPoolExecutor(1) as other:
        done = other.submit(work)
        try:
            for turn in range(300):
                head.rule.threshold = float(turn % 2)
        finally:
            over.append(None)
        assert done.result() <= set(map(tuple, right))
