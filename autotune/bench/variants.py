"""The benchmark's variants of a cell: how each is built, where it is measured, and its baselines."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...model import AutoRunner, ExitResult, Trunk, make_runner, make_trunk
from ..measuring.cells import AS_IS, MIXED, MORE_TRUNKS, NEVER, RUNNERS, TRUNKS, Cell
from ..measuring.eager_truth import EagerTruth, Rounding, measure_rounding
from ..measuring.peers import (
    GraphedPeer,
    NaiveHead,
    PeerAnswer,
    bare,
    compiled,
    forked,
    heads_alone,
    in_line,
    merged_answer,
    truncated,
    with_item,
)
from ..measuring.subject import Subject
from ..measuring.timers import CAPTURES
from ..records.zoo import DEFAULT

#: Batch sizes at which max-autotune is compiled, which takes minutes.
MAX_AUTOTUNE_BATCHES = (1, 32)
#: Largest batch of which all taps' outputs are kept, for all inputs, to call heads by themselves.
HEADS_ALONE_BATCH = 8
#: Runners that are made without options: the first as on a new machine, the second by what is remembered.
DEFAULT_CAPTURES = 2
#: Fresh captures of "auto", fewer than of the others: each captures and measures several runners.
AUTO_CAPTURES = 2


class BuiltVariant(NamedTuple):
    """One capture of a variant, ready to be called."""

    call: Callable[[Tensor], Any]
    close: Callable[[], None] = lambda: None
    note: str | None = None
    """A sentence on what other captures of the variant may not share."""
    first_answer_s: float | None = None
    """Seconds from the call that makes it until its first answer was there, of what is made by one call."""
    trunk: Trunk | None = None
    """The trunk that it runs, where it chose that itself."""

    def answer_to(self, x: Tensor) -> ExitResult:
        """Call for one input and return what is compared."""
        return merged_answer(self.call(x))


@dataclass
class VariantCaptures:
    """Captures of one cell's variants, and what these share: trunks, naive heads, and the truth on each trunk."""

    subject: Subject
    trunks: dict[str, Trunk] = field(default_factory=dict)
    built: dict[str, list[BuiltVariant]] = field(default_factory=dict)
    """Captures by variant; if a build failed, those made before it."""
    failed: dict[str, str] = field(default_factory=dict)
    """Errors of variants that are not to be built again."""
    _truths: dict[str, EagerTruth] = field(default_factory=dict)

    def build(self, variant: "Variant", pattern: str) -> list[BuiltVariant]:
        """Return the captures of a variant for an exit pattern, built unless they are there.

        Raises:
            Exception: whatever a capture fails with.
        """
        if variant.name not in self.built:
            captures = self.built.setdefault(variant.name, [])
            for _ in range(variant.captures):
                captures.append(variant.build(self, pattern))
        return self.built[variant.name]

    def drop(self, name: str) -> None:
        """Close a variant's captures."""
        for capture in self.built.pop(name, []):
            capture.close()

    def close(self) -> None:
        """Close all captures."""
        for name in list(self.built):
            self.drop(name)

    def trunk(self, kind: str) -> Trunk:
        """Return the trunk of that kind, made once."""
        if kind not in self.trunks:
            network = self.subject.network
            self.trunks[kind] = make_trunk(network.backbone, network.taps, self.subject.example, kind, network.reading)
        return self.trunks[kind]

    def truth_of(self, variant: "Variant", capture: BuiltVariant) -> EagerTruth:
        """Return the truth for all inputs on the trunk that a capture of a variant runs."""
        if capture.trunk is None:
            return self.truth(variant.trunk)
        return EagerTruth(self.subject.network, capture.trunk, self.subject.inputs, self._rounding)

    def truth(self, kind: str) -> EagerTruth:
        """Return the truth for all inputs on the trunk of that kind, computed once."""
        if kind not in self._truths:
            network, inputs = self.subject.network, self.subject.inputs
            self._truths[kind] = EagerTruth(network, self.trunk(kind), inputs, self._rounding)
        return self._truths[kind]

    @cached_property
    def _rounding(self) -> Rounding:
        return measure_rounding(self.subject.network, self.subject.inputs)

    @cached_property
    def naive_heads(self) -> list[NaiveHead]:
        """Heads of many launches with the weights of the network's."""
        return [NaiveHead(head).eval() for head in self.subject.heads]

    def heads(self, kind: str) -> Sequence[Callable[[Tensor], Any]]:
        """Return the heads, "naive" or "fused"."""
        return self.naive_heads if kind == "naive" else self.subject.heads


#: Builds one fresh capture of a variant for an exit pattern.
Build = Callable[[VariantCaptures, str], BuiltVariant]


@dataclass(frozen=True)
class Variant:
    """One way to run the network of a cell."""

    name: str
    """Kind, "@", trunk."""
    build: Build
    trunk: str = AS_IS
    captures: int = CAPTURES
    never: bool = True
    """Measured where no sample exits early."""
    exits: bool = False
    """Measured where all samples leave at one tap."""
    mixed: bool = False
    """Measured where samples leave at several exits."""
    exits_early: bool = True
    """False: has no heads and is compared with the classifier's answer whatever the exits."""
    per_pattern: bool = False
    """Built anew for every exit pattern, since it depends on it."""
    by_default: bool = True
    plain: str | None = None
    """A variant that this one must not be slower than: a further baseline of its ratios."""
    note: str | None = None

    def runs(self, pattern: str) -> bool:
        """Return whether it is measured for that exit pattern."""
        if pattern == NEVER:
            return self.never
        return self.mixed if pattern in MIXED.values() else self.exits


def bare_name(trunk: str) -> str:
    """Return the name of the baseline of every ratio: the bare trunk of that kind in one graph."""
    return f"graph-bare@{trunk}"


def truncated_name(trunk: str) -> str:
    """Return the name of the lower bound for one exit: a graph of the trunk up to the tap, and its head."""
    return f"truncated@{trunk}"


def smaller_sizes(batch: int) -> tuple[int, ...]:
    """Return the batch sizes that a batch may be compacted to: itself and eighths of it, up to six."""
    return tuple(sorted({-(-batch * eighths // 8) for eighths in (1, 2, 3, 4, 5, 6, 8)}))


def catalogue(cell: Cell) -> list[Variant]:
    """Return every variant of a cell, in the order of the tables."""

    def peer(
        name: str, function: Callable[..., PeerAnswer], heads: str | None, trunk: str = AS_IS, **how: Any
    ) -> Variant:
        in_graph = name.startswith("graph")
        build = partial(_peer, function, heads, trunk, in_graph)
        how = {"captures": CAPTURES if in_graph else 1, "by_default": trunk not in MORE_TRUNKS, **how}
        return Variant(f"{name}@{trunk}", build, trunk, **how)

    variants = [
        peer("eager-bare", bare, None, exits_early=False),
        peer("eager-naive", in_line, "naive"),
        peer("eager-naive-item", with_item, "naive", exits=True, mixed=True),
    ]
    if cell.batch <= HEADS_ALONE_BATCH:
        variants += [
            Variant(f"eager-heads-{heads}@as_is", partial(_heads_alone, heads), captures=1)
            for heads in ("naive", "fused")
        ]
    for mode in ("reduce-overhead", "max-autotune"):
        if mode == "reduce-overhead" or cell.batch in MAX_AUTOTUNE_BATCHES:
            variants += [
                Variant(
                    f"compile-{heads or 'bare'}-{mode}@as_is",
                    partial(_compiled, heads, mode),
                    captures=1,
                    exits_early=heads is not None,
                    note="compiled once",
                )
                for heads in (None, "naive")
            ]
    for trunk in (*TRUNKS, *MORE_TRUNKS):
        add = partial(Variant, trunk=trunk, by_default=trunk in TRUNKS)
        variants += [
            peer("graph-bare", bare, None, trunk, exits=True, mixed=True, exits_early=False),
            peer("graph-naive", in_line, "naive", trunk),
            peer("graph-naive-forked", forked, "naive", trunk),
            peer("graph-fused", in_line, "fused", trunk),
            add(truncated_name(trunk), partial(_truncated, trunk), never=False, exits=True, per_pattern=True),
        ]
        variants += [
            add(f"{runner}@{trunk}", partial(_runner, trunk, runner), exits=True, mixed=True) for runner in RUNNERS
        ]
        if cell.placement in MIXED and cell.batch > 1:
            compact = partial(_runner, trunk, "polled", compact=True)
            variants.append(add(f"polled-compact@{trunk}", compact, mixed=True))
        auto = partial(add, captures=AUTO_CAPTURES, per_pattern=True, plain=f"overlapped@{trunk}")
        variants.append(auto(f"auto@{trunk}", partial(_auto, trunk), exits=True, mixed=True))
    variants.append(Variant(DEFAULT, _default, captures=DEFAULT_CAPTURES, per_pattern=True, by_default=False))
    eager = partial(_runner, AS_IS, "eager")
    variants.append(Variant("eager@as_is", eager, captures=1, exits=True, mixed=True))
    variants.append(Variant("eager-stop@as_is", _stopping, captures=1, exits=True, mixed=True))
    return variants


def _in_graph(function: Callable[[Tensor], PeerAnswer], trunk: str, captures: VariantCaptures) -> BuiltVariant:
    graph = GraphedPeer(function, captures.trunk(trunk).memory_for(captures.subject.example))
    return BuiltVariant(graph)


def _peer(
    peer: Callable[..., PeerAnswer], heads: str | None, trunk: str, in_graph: bool, captures: VariantCaptures, _: str
) -> BuiltVariant:
    """Build a peer, eager or in a graph."""
    function = partial(peer, captures.trunk(trunk), captures.subject.network.taps)
    if heads is not None:
        function = partial(function, captures.heads(heads))
    return _in_graph(function, trunk, captures) if in_graph else BuiltVariant(torch.no_grad()(function))


def _heads_alone(heads: str, captures: VariantCaptures, _pattern: str) -> BuiltVariant:
    subject = captures.subject
    alone = heads_alone(captures.trunk(AS_IS), subject.network.taps, captures.heads(heads), subject.inputs)
    return BuiltVariant(torch.no_grad()(alone))


def _truncated(trunk: str, captures: VariantCaptures, pattern: str) -> BuiltVariant:
    network = captures.subject.network
    stop_at = network.taps.index(pattern)
    function = partial(truncated, captures.trunk(trunk), network.taps, captures.subject.heads, stop_at)
    return _in_graph(function, trunk, captures)


def _compiled(heads: str | None, mode: str, captures: VariantCaptures, _pattern: str) -> BuiltVariant:
    subject = captures.subject
    began = time.monotonic()
    call = compiled(subject.network, [] if heads is None else captures.naive_heads, mode)
    call(subject.example)  # compiles
    torch.cuda.synchronize(subject.example.device)
    took = time.monotonic() - began
    for _ in range(2):  # warms up, then records its graph
        call(subject.example)
    return BuiltVariant(call, first_answer_s=took)


def _runner(trunk: str, exits: str, captures: VariantCaptures, _pattern: str, **compact: Any) -> BuiltVariant:
    subject = captures.subject
    batch = subject.cell.batch
    sizes = smaller_sizes(batch) if compact else (batch,)
    runner = make_runner(subject.network, subject.example, exits=exits, batch_sizes=sizes, trunk=trunk, **compact)
    return BuiltVariant(runner, runner.close)


def _default(captures: VariantCaptures, _pattern: str) -> BuiltVariant:
    """Make a runner as people first do."""
    subject = captures.subject
    began = time.monotonic()
    runner = make_runner(subject.network, subject.example)
    runner(subject.example).label.cpu()
    took, size = time.monotonic() - began, len(subject.example)
    if not isinstance(runner, AutoRunner):
        return BuiltVariant(runner, runner.close, runner.describe(), took)
    said = f"Batch {size}: {runner.plans[size].describe()}"
    return BuiltVariant(runner, runner.close, said, took, runner.runners[size].trunk)


def _stopping(captures: VariantCaptures, _pattern: str) -> BuiltVariant:
    """Call the network as people first do, who leave it as soon as all are sure."""
    return BuiltVariant(partial(captures.subject.network, stop=True))


def _auto(trunk: str, captures: VariantCaptures, _pattern: str) -> BuiltVariant:
    """Let "auto" choose by the subject's inputs and the rules in force now."""
    subject = captures.subject
    samples, sizes = subject.samples_for_auto, (subject.cell.batch,)
    # Every candidate is measured, whatever time that takes on a slower GPU.
    runner = AutoRunner(subject.network, samples, batch_sizes=sizes, trunk=trunk, budget="thorough")
    note = f"Batch {subject.cell.batch}: {runner.plans[subject.cell.batch].describe()}"
    return BuiltVariant(runner, runner.close, note)
