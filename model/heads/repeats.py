"""Repeats: what was checked, chosen and launched once is made again with other tensors in a fraction of the time.

Of a head here, of a network's exits in network/exits_repeat.py; bit for bit, for inputs of the same layout on the same
stream, as long as nothing that they rest on has changed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import is_not
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards  # in PyTorch's core; Dynamo itself is not imported
from torch.autograd import forward_ad

from ...kernels import HeadOutput, HiddenLayers, decide, runs_triton
from ...kernels.cuda.runtime import is_capturing
from ...kernels.launch.arrival_counters import arrival_counters
from ...kernels.launch.choose_config import overrides
from ...kernels.launch.memory import HeadArguments
from ...kernels.launch.residency import is_recording
from ...kernels.noted import NotedLaunch, are_launches_watched, noting
from ...kernels.reference.fused_head import backward, logits_of, save_for_backward
from ..answers.rule_order import count_writes, wait_for_write
from ..basics.streams import current_handle, has_streams
from ..listening.hooks import WAYS, hooks_of
from .driver_launch import repeated

RepeatT = TypeVar("RepeatT")
#: Repeats that are kept; before there are more all are forgotten.
_MOST = 16
#: Triton's code for an input that is aligned to so many bytes is another than for one that is not.
ALIGNED = 16


class TensorForms:
    """Forms of some tensors, no two of which are the same object.

    What ``torch.compile`` guards its code by: one call of C for all tensors, where shapes and strides of each one by
    one take several times that, a microsecond for eight heads' parameters where it was six.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Remember the tensors' forms, and none of the tensors."""
        inference = torch.is_inference_mode_enabled()  # a guard holds for the mode that it was made in
        self._fit = {}
        for mode in (inference, not inference):
            with nullcontext() if mode is inference else torch.inference_mode(mode):
                self._fit[mode] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check

    def are_those_of(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether as many tensors have these forms, and mean the same by their memory (lazily negated or not).

        Neither modes, transforms nor autocast may be active but those that were.
        """
        return bool(self._fit[torch.is_inference_mode_enabled()](*tensors))


class ReadTensors:
    """Parameters, rules and options of heads, as they were when something was made that knows where they lie."""

    def __init__(self, heads: Sequence[Any]) -> None:
        """Remember the heads' layers, rules, options and tensors, and where and how the tensors lie.

        Raises:
            KeyError: a head's layer has no parameters of its own: it is parametrized or pruned, or part of a replica.
        """
        # Looked up without nn.Module's attribute access, which would cost each call some microseconds a head.
        places: list[tuple[Mapping[str, object], str]] = []
        for head in heads:
            places += [*head.depends_on(), *((vars(head), name) for name in head.options)]
        self._heads = list(heads)
        self._objects = [place[name] for place, name in places]
        parts = [part for head in heads for _, part in head.parts()]
        self._parts = [*heads, *parts]
        self._kinds = [*map(type, self._parts)]
        self._hooks = [hooks for part in parts for hooks in hooks_of(part)]
        own = [*((vars(head), name) for head in heads for name in WAYS), *((vars(part), "forward") for part in parts)]
        self._objects += [None] * len(own)  # plain ones have none
        self._places, self._names = zip(*places, *own, strict=True)
        self._tensors = [one for one in self._objects if isinstance(one, Tensor)]
        self.parameters = [one for one in self._tensors if isinstance(one, nn.Parameter)]
        """Weights and biases."""
        self.addresses = [*map(Tensor.data_ptr, self._tensors)]
        """Where the tensors lay: of each head weights and biases, the last layer's first, temperature and threshold."""
        self._distinct = [*{id(one): one for one in self._tensors}.values()]
        self._forms = TensorForms(self._distinct)

    def are_plain(self) -> bool:
        """Return whether launches follow the heads, and the memory of all tensors is as it seems.

        That is, none is of a subclass, lazily negated or without any.
        """
        return all(head.why_not_launched() is None for head in self._heads) and all(
            type(one) in (Tensor, nn.Parameter) and not one.is_neg() and not one._is_zerotensor()
            for one in self._tensors
        )

    def are_those_of(self, heads: Sequence[nn.Module]) -> bool:
        """Return whether heads are these, with the same plain layers, options and tensors, in the same memory."""
        return not (
            len(heads) != len(self._heads)
            or any(map(is_not, heads, self._heads))
            or any(map(is_not, map(dict.get, self._places, self._names), self._objects))
            or [*map(type, self._parts)] != self._kinds
            or any(self._hooks)
            or [*map(Tensor.data_ptr, self._tensors)] != self.addresses
            or not self._forms.are_those_of(self._distinct)
        )


class Kept(Generic[RepeatT]):
    """A repeat, and what it rests on."""

    def __init__(self, repeat: RepeatT, read: ReadTensors, writes: int = -1) -> None:
        """Keep a repeat for a stream that has seen the first ``writes`` of all writes to rules in the process."""
        self.repeat, self.read = repeat, read
        self._writes = writes

    def wait_for_rules(self, heads: Iterable[nn.Module], x: Tensor) -> None:
        """Let the current stream of x's device, the repeat's, come after all writes to the heads' rules."""
        writes = count_writes()
        if self._writes != writes:
            for head in heads:
                wait_for_write(head.rule, x)  # type: ignore[arg-type]  # a module's attributes are of any type
            self._writes = writes


class Repeats(Generic[RepeatT]):
    """Repeats of the same heads by what they are for: the layout of an input, or a batch, and the stream."""

    def __init__(self) -> None:
        """Have none yet."""
        self._kept: dict[tuple[Any, ...], Kept[RepeatT]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies of the owner, deep or pickled, make repeats of their own."""
        return type(self), ()

    def unchanged(self, key: tuple[Any, ...], heads: Sequence[nn.Module], x: Tensor) -> Kept[RepeatT] | None:
        """Return a repeat that was made of the same heads, options and tensors; the stream then follows their rules."""
        kept = self._kept.get(key)
        if kept is None or not kept.read.are_those_of(heads):
            return None
        kept.wait_for_rules(heads, x)
        return kept

    def make(
        self,
        heads: Sequence[Any],
        repeat_of: Callable[[ReadTensors], RepeatT | None],
        key: tuple[Any, ...] | None,
        writes: int = -1,
    ) -> Kept[RepeatT] | None:
        """Make a repeat, and keep it instead of another of its key, if it has one; None if there can be none."""
        try:
            read = ReadTensors(heads)
        except KeyError:
            return None
        repeat = repeat_of(read) if read.are_plain() else None
        if repeat is None:
            return None
        kept = Kept(repeat, read, writes)
        if key is not None:
            if len(self._kept) >= _MOST:
                self._kept.clear()
            self._kept[key] = kept
        return kept


class HeadRepeat:
    """A head's launches on one stream, which share their workspace, as they run one after another."""

    def __init__(self, launches: Sequence[NotedLaunch], stream: int) -> None:
        """Repeat launches that were made for one head on a stream, given by its handle: one may pack its features."""
        *packs, noted = launches
        given = noted.given()
        ((arguments, _),) = given["places"]
        x = arguments[0][0]  # the input, or packed features
        self._pack = repeated(packs[0], [packs[0].given()["packed"][0][0][0], x], stream) if packs else None
        self._features = x.new_empty(1)
        self._shape = x.shape
        probs, label, confidence, exits = given["output"]
        self._samples, self._classes, self._with_probs = len(x), given["LAUNCH"].classes, probs is not None
        # Tensors to make others like: torch.empty takes twice the time, since it looks for the device.
        self._floats, self._ints, self._bools = (one.new_empty(1) for one in (confidence, label, exits))
        self._of: Callable[[Tensor], Any] = Tensor.data_ptr if noted.compiled else lambda tensor: tensor
        outputs = (label, confidence, exits, *([probs] if self._with_probs else []))
        self._repeat = repeated(noted, [x, *outputs], stream)

    def __call__(self, x: Tensor) -> HeadOutput:
        """Launch on the stream, which is current, for an input like that of the noted launch."""
        samples = self._samples
        if self._pack is not None:
            features = self._features.new_empty(self._shape)
            self._pack([self._of(x), self._of(features)])
            x = features
        probs = self._floats.new_empty((samples, self._classes)) if self._with_probs else None
        label = self._ints.new_empty(samples)
        confidence = self._floats.new_empty(samples)
        exits = self._bools.new_empty(samples)
        given = (x, label, confidence, exits) if probs is None else (x, label, confidence, exits, probs)
        self._repeat([*map(self._of, given)])
        return HeadOutput(probs, label, confidence, exits)


def cpu_head(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, pool: str, pool_size: tuple[int, int], temperature: Tensor,
    threshold: Tensor, criterion: str, return_probs: bool, hidden: HiddenLayers,
) -> HeadOutput:  # fmt: skip
    """Answer as ``fused_head_reference`` does, bit for bit, in half of the operations.

    The rule's tensors have no dimension. The temperature is read here, and a NaN is looked for among the confidences
    alone, by the host.
    """
    logits, divisor = logits_of(x, weight, bias, pool, pool_size, hidden), temperature.item()
    if criterion == "max_prob" and 0.0 < divisor < math.inf:
        if divisor == 1.0:
            label = logits.argmax(-1)
            probs = torch.softmax(logits, -1)  # which subtracts the largest itself, to the same effect
        else:  # a logit divided by the temperature may overflow
            largest, label = logits.max(-1)
            probs = torch.softmax((logits - largest[:, None]) / divisor, -1)
        confidence = probs.amax(-1)
        if not math.isnan(sum(confidence.tolist())):
            return HeadOutput(probs if return_probs else None, label, confidence, confidence > threshold)
    output = decide(logits, temperature, threshold, criterion)
    return output if return_probs else output._replace(probs=None)


class _Differentiable(torch.autograd.Function):
    """A repeated call, differentiable as the operator, whose arguments ``apply`` takes, and behind them the repeat."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> HeadOutput:
        """Answer."""
        *inputs, repeat = arguments
        output: HeadOutput = repeat(inputs[0])
        save_for_backward(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the operator's gradients."""
        return (*backward(ctx, *grads), None)


def answer(
    repeats: Repeats[Callable[[Tensor], HeadOutput]], head: Any, x: Tensor, call: Callable[[Tensor], HeadOutput]
) -> HeadOutput:
    """Answer for one head by a repeat, or by ``call``, what it launches then being repeated next time."""
    if not is_plain_call(x):
        return call(x)
    stream = 0
    if has_streams(x):
        if torch.cuda.current_device() != x.device.index or is_capturing(x.device):
            return call(x)
        stream = current_handle(x.device)
    key = (stream, x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNED)
    kept = repeats.unchanged(key, [head], x)
    if kept is None:
        writes = count_writes()
        with noting() as launches:
            output = call(x)
        repeats.make([head], lambda read: _repeat_of(head, x, stream, launches, read), key, writes)
        return output
    if torch.is_grad_enabled() and (x.requires_grad or any(one.requires_grad for one in kept.read.parameters)):
        linear, rule = head.linear, head.rule
        return HeadOutput(*_Differentiable.apply(
            x, linear.weight, linear.bias, rule.temperature_tensor, None, 1.0, 1.0, head.pool, head.pool_size,
            rule.criterion, head.return_probs, *head.hidden_layers(), kept.repeat,
        ))  # fmt: skip
    return kept.repeat(x)


def is_plain_call(x: Tensor) -> bool:
    """Return whether a tensor lies in memory as it seems, and nobody follows or changes operations on it.

    Neither modes, transforms, tracers and autocast do, nor whoever watches launches of heads, or chooses them.
    """
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or overrides.get() is not None
        or is_recording()
        or are_launches_watched()
        or x.layout is not torch.strided
        or x.is_nested
        or not (x.is_cuda or x.is_cpu)
        or torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
        or x.is_neg()
        or x._is_zerotensor()  # which has no memory
        or not x.ndim
        or not x.shape[0]
    )


def _repeat_of(
    head: Any, x: Tensor, stream: int, launches: list[NotedLaunch], read: ReadTensors
) -> Callable[[Tensor], HeadOutput] | None:
    """Make a repeat of a call that was made, with the tensors that were read after it; None if none can be made."""
    if not runs_triton(x):
        if not x.is_cpu:
            return None
        linear, rule = head.linear, head.rule
        return partial(
            cpu_head, weight=linear.weight, bias=linear.bias,
            temperature=rule.temperature_tensor, threshold=rule.threshold_tensor,
            pool=head.pool, pool_size=head.pool_size, criterion=rule.criterion, return_probs=head.return_probs,
            hidden=head.hidden_layers(),
        )  # fmt: skip
    packs = [one.packs for one in launches]
    if packs not in ([False], [True, False]) or not arrival_counters(x.device).are_kept(stream):
        return None
    if not launches[-1].given()["LAUNCH"].places[0].is_fused:  # a library's product comes before it
        return None
    given = HeadArguments(*launches[-1].given()["places"][0][0])
    layer, norm = (given.weight, given.bias), (given.norm or ())[:2]
    parameters = [*layer, *norm] if given.last is None else [*given.last[:2], *norm, *layer]
    launched = [*(one for one, *_ in parameters if one is not None), *given.rule]
    # another thread's are there now, or x is one of them, of which a repeat would put others in all its places
    if [one.data_ptr() for one in launched] != read.addresses or x.data_ptr() in read.addresses:
        return None
    return HeadRepeat(launches, stream)
