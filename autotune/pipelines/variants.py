"""Variants of the benchmark over several GPUs: one GPU, the tutorial's two networks, and pipelines of ours.

A pipeline is built by all processes alike, and serves all batches; what the others are lives in the first process, and
the rest do nothing meanwhile.
"""

import copy
import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...model import EarlyExitNetwork, pipelined
from ...model.parallel.pipeline.runner import PipelinedRunner
from ...model.trunk.trunk import Trunk, make_trunk
from ..measuring.cells import AS_IS, Cell
from ..measuring.eager_truth import Answer
from ..measuring.peers import GraphedPeer, PeerAnswer, bare, merged_answer
from ..measuring.subject import Subject

#: Of each network the tap where it is cut for two GPUs, that of PyTorch's tutorial.
CUT = "layer2"


class ModelParallelResNet(nn.Module):
    """Tutorial's ``ModelParallelResNet50``: layers up to ``cut`` on one device, the others on another."""

    def __init__(self, backbone: nn.Module, cut: str, first: torch.device, second: torch.device) -> None:
        """Split copies of the layers of one of torchvision's ResNets."""
        super().__init__()
        children = [(name, child) for name, child in backbone.named_children() if name != "fc"]
        end = [name for name, _ in children].index(cut) + 1
        self.second = second
        self.seq1 = nn.Sequential(*(copy.deepcopy(child) for _, child in children[:end])).to(first)
        self.seq2 = nn.Sequential(*(copy.deepcopy(child) for _, child in children[end:])).to(second)
        self.fc = copy.deepcopy(backbone.get_submodule("fc")).to(second)

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, on the second device."""
        x = self.seq2(self.seq1(x).to(self.second))
        return self.fc(x.view(x.size(0), -1))


class PipelineParallelResNet(ModelParallelResNet):
    """Tutorial's ``PipelineParallelResNet50``: micro-batches, so that both devices work at a time."""

    def __init__(
        self, backbone: nn.Module, cut: str, first: torch.device, second: torch.device, split_size: int
    ) -> None:
        """Split layers as the other does, and batches into ``split_size`` samples."""
        super().__init__(backbone, cut, first, second)
        self.split_size = split_size

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, on the second device."""
        splits = iter(x.split(self.split_size, dim=0))
        s_next = next(splits)
        s_prev = self.seq1(s_next).to(self.second)
        ret = []

        for s_next in splits:
            # A. ``s_prev`` runs on the second device
            s_prev = self.seq2(s_prev)
            ret.append(self.fc(s_prev.view(s_prev.size(0), -1)))

            # B. ``s_next`` runs on the first device, which can run concurrently with A
            s_prev = self.seq1(s_next).to(self.second)

        s_prev = self.seq2(s_prev)
        ret.append(self.fc(s_prev.view(s_prev.size(0), -1)))
        return torch.cat(ret)


#: Kinds of pipelines: a head at the cut alone, and heads after every stage.
ONE_HEAD, HEADS = "pipelined-one-head", "pipelined-heads"
ONE_GPU, ONE_GPU_FUSED, NAIVE, TUTORIAL = "one-gpu", "one-gpu-cudnn", "model-parallel", "tutorial"
#: The trunk of our pipelines, and of one GPU beside them.
FUSED = "cudnn"


@dataclass(frozen=True)
class PipelineOptions:
    """What is measured of one network, handed to each process as JSON."""

    cell: Cell
    """With the largest batch."""
    batches: tuple[int, ...]
    split_sizes: tuple[int, ...]
    rounds: int
    out: str
    """The file of records."""
    device: str = "cuda"
    """Kind of the processes' devices."""
    captures: int = 5
    processes: int = 2

    def splits_of(self, batch: int) -> tuple[int, ...]:
        """Return the split sizes that make micro-batches of a batch, two at least."""
        return tuple(size for size in self.split_sizes if size < batch)

    def cell_of(self, batch: int) -> Cell:
        """Return the cell with that batch."""
        return dataclasses.replace(self.cell, batch=batch)

    def to_json(self) -> str:
        """Return the options as one argument of a command."""
        return json.dumps({**dataclasses.asdict(self), "cell": self.cell.as_json()})

    @classmethod
    def from_json(cls, text: str) -> "PipelineOptions":
        """Return the options that ``to_json`` gave."""
        values: dict[str, Any] = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("batches", "split_sizes")}
        return cls(**{**values, **lists, "cell": Cell.from_json(values["cell"])})


@dataclass(frozen=True)
class Case:
    """One variant for one batch, of which no sample leaves: what a record is about."""

    batch: int
    variant: str
    split_size: int | None = None

    @property
    def name(self) -> str:
        """Name in records."""
        return self.variant if self.split_size is None else f"{self.variant}@{self.split_size}"

    @property
    def trunk(self) -> str:
        """How the backbone is run."""
        return FUSED if self.together or self.variant == ONE_GPU_FUSED else AS_IS

    @property
    def together(self) -> bool:
        """Whether all processes take part in it."""
        return self.variant in (ONE_HEAD, HEADS)


def cases_of(options: PipelineOptions) -> list[Case]:
    """Return all that is measured, in the order of the tables."""
    found = []
    for batch in options.batches:
        splits = options.splits_of(batch)
        found += [Case(batch, ONE_GPU), Case(batch, ONE_GPU_FUSED), Case(batch, NAIVE)]
        found += [Case(batch, TUTORIAL, size) for size in splits]
        found += [Case(batch, kind, size) for kind in (ONE_HEAD, HEADS) for size in splits]
    return found


class Variants:
    """Everything that is measured, in this process: pipelines as in all others, what the first one runs by itself."""

    def __init__(self, options: PipelineOptions, subject: Subject, second: torch.device | None) -> None:
        """Build no pipeline yet; in the first process put copies of the layers on its device and on ``second``."""
        network, example = subject.network, subject.example
        self._options, self._taps, self._example = options, network.taps, example
        at_cut = dict(zip(network.taps, network.fused_heads, strict=True))[CUT]
        alone = EarlyExitNetwork(network.backbone, {CUT: at_cut}, example_input=example[:2]).eval()
        self._networks = {ONE_HEAD: alone, HEADS: network}
        self.runners: dict[tuple[str, int], PipelinedRunner] = {}
        """Pipelines by kind and split size."""
        self.trunks: dict[str, Trunk] = {}
        """Of the first process, by kind."""
        self._tutorial: dict[int | None, ModelParallelResNet] = {}
        self._graphs: dict[tuple[int, str], GraphedPeer] = {}
        if second is not None:
            parts = (network.backbone, CUT, example.device, second)
            for kind in (AS_IS, FUSED):
                self.trunks[kind] = make_trunk(network.backbone, network.taps, example, kind, network.reading)
            self._tutorial[None] = ModelParallelResNet(*parts).eval()
            self._tutorial |= {size: PipelineParallelResNet(*parts, size).eval() for size in options.split_sizes}

    def build(self, kind: str, open_one: Callable[[PipelinedRunner], PipelinedRunner]) -> None:
        """Build the pipelines of a kind, and let ``open_one`` close them in the end."""
        for size in sorted({size for batch in self._options.batches for size in self._options.splits_of(batch)}):
            built = pipelined(
                self._networks[kind], self._example, split_size=size, stages=[CUT], trunk=FUSED, timeout_s=60.0
            )
            self.runners[kind, size] = open_one(built)

    def capture(self) -> None:
        """Capture anew, in this process, the stages of all pipelines, and the network on one GPU."""
        for (_, size), runner in self.runners.items():
            runner.stage.capture(self._example[:size])
        self._graphs.clear()
        if self._example.is_cuda:
            for kind, trunk in self.trunks.items():
                for batch in self._options.batches:
                    with trunk.choosing(batch):
                        graph = GraphedPeer(partial(self._alone, kind), self._example[:batch])
                    self._graphs[batch, kind] = graph

    def _alone(self, kind: str, x: Tensor) -> PeerAnswer:
        with torch.no_grad():
            return bare(self.trunks[kind], self._taps, x)

    def call_of(self, case: Case) -> Callable[[Tensor], Any]:
        """Return what this process calls in a case: to answer, to take part in it, or to do nothing."""
        if case.together:
            assert case.split_size is not None
            runner = self.runners[case.variant, case.split_size]
            return runner if runner.is_first else lambda _x: runner(None)
        if not self.trunks:
            return lambda _x: None
        if case.variant in (ONE_GPU, ONE_GPU_FUSED):
            return self._graphs.get((case.batch, case.trunk), partial(self._alone, case.trunk))
        return self._tutorial[case.split_size]

    def answer_of(self, case: Case, x: Tensor) -> Answer:
        """Return the answer of the first process in a case, on the device of ``x``."""
        found = self.call_of(case)(x)
        if case.together:
            answer = Answer.of(found)
            if case.variant == ONE_HEAD:  # counts its own exits: the one at the cut, and the classifier
                at_cut = answer.exit_index == 0
                exits = torch.where(at_cut, self._taps.index(CUT), len(self._taps))
                answer = answer._replace(exit_index=exits)
            return answer
        if isinstance(found, Tensor):
            found = PeerAnswer([], found.to(x.device).clone(), len(self._taps))
        return merged_answer(found)
