"""Images a second of a ResNet cut in two for two GPUs, beside one GPU and the networks of PyTorch's tutorial.

    torchrun --standalone --nproc-per-node 2 -m auxhead.autotune.studies.pipelines --out pipelines.jsonl

Every process builds every pipeline; the first one also runs the rest, for which the other waits.
"""

import copy
import dataclasses
import os
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn

from ...model import EarlyExitNetwork, ExitResult, pipelined
from ...model.commands.errors import one_line_errors
from ...model.parallel.pipeline.runner import PipelinedRunner
from ...model.processes.process_group import joined_processes
from ...model.trunk.timed_convolutions import fastest_convolutions
from ...model.trunk.trunk import make_trunk
from ..measuring.cells import AS_IS, NEVER, Cell, resnet_cell
from ..measuring.eager_truth import Comparison, EagerTruth, measure_rounding, wrong_in_words
from ..measuring.environment import clocks, environment
from ..measuring.failures import refuse
from ..measuring.peers import GraphedPeer, PeerAnswer, bare, merged_answer
from ..measuring.subject import Subject, build_subject
from ..measuring.timers import time_request
from ..records.record import BadRecord, Record, append_record, check_out
from ..records.summaries import as_json, summary

#: The tap where each network is cut, as in PyTorch's tutorial, and the trunk of our pipelines.
CUT, FUSED = "layer2", "cudnn"
#: Samples that say how far rounding moves answers.
_ROUNDING_SAMPLES = 32
#: NCCL's own thread looks at exchanges that have ended for some time, by calls that a capture does not allow.
_SETTLE_S = 0.5


class TutorialPipeline(nn.Module):
    """Tutorial's ``PipelineParallelResNet50``; with one micro-batch a request it is its ``ModelParallelResNet50``."""

    def __init__(self, backbone: nn.Module, first: torch.device, second: torch.device, split_size: int) -> None:
        """Copy the layers up to ``CUT`` to one device, the others to another."""
        super().__init__()
        children = [(name, child) for name, child in backbone.named_children() if name != "fc"]
        end = [name for name, _ in children].index(CUT) + 1
        self.second, self.split_size = second, split_size
        self.seq1 = nn.Sequential(*(copy.deepcopy(child) for _, child in children[:end])).to(first)
        self.seq2 = nn.Sequential(*(copy.deepcopy(child) for _, child in children[end:])).to(second)
        self.fc = copy.deepcopy(backbone.get_submodule("fc")).to(second)

    @torch.inference_mode()
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, on the second device."""
        splits = iter(x.split(self.split_size, dim=0))
        s_prev = self.seq1(next(splits)).to(self.second)
        ret = []
        for s_next in splits:
            ret.append(self.fc(self.seq2(s_prev).flatten(1)))  # on the second device
            s_prev = self.seq1(s_next).to(self.second)  # meanwhile on the first one
        ret.append(self.fc(self.seq2(s_prev).flatten(1)))
        return torch.cat(ret)


class Case(NamedTuple):
    """A variant for one batch, in micro-batches if it has a split size."""

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
        return AS_IS if self.variant in ("one-gpu", "model-parallel", "tutorial") else FUSED


def cases_of(batches: Sequence[int], split_sizes: Sequence[int]) -> list[Case]:
    """Return all that is measured, in the order of the tables."""
    whole = [Case(batch, name) for batch in batches for name in ("one-gpu", "one-gpu-cudnn", "model-parallel")]
    kinds = ("tutorial", "pipelined-one-head", "pipelined-heads")
    return whole + [Case(b, kind, size) for b in batches for kind in kinds for size in split_sizes if size < b]


class Study:
    """One process's part; both go through the same steps in the same order."""

    def __init__(self, subject: Subject, rank: int, cases: Sequence[Case], opened: ExitStack) -> None:
        """Build what is measured; pipelines are closed with ``opened``."""
        network, self.example = subject.network, subject.example
        device = self.example.device
        with torch.no_grad():  # statistics of batch norms differ from GPU to GPU in their last bits
            for tensor in chain(network.parameters(), network.buffers()):
                dense: Any = tensor.detach().contiguous()
                dist.broadcast(dense, 0)
                tensor.copy_(dense)
        second = torch.device("cuda", 1) if device.type == "cuda" else device
        self.subject, self.cases, self.first = subject, cases, rank == 0
        self.devices = [device, second] if self.first else [device]
        self.runners: dict[tuple[str, int], PipelinedRunner] = {}
        head = network.exit_heads[network.taps.index(CUT)]
        networks = {"pipelined-heads": network, "pipelined-one-head": EarlyExitNetwork(network.backbone, {CUT: head})}
        sizes = sorted({case.split_size for case in cases if case.split_size is not None})
        for (kind, of_kind), size in product(networks.items(), sizes):
            options: dict[str, Any] = {"split_size": size, "stages": [CUT], "trunk": FUSED, "timeout_s": 60.0}
            self.runners[kind, size] = opened.enter_context(pipelined(of_kind.eval(), self.example, **options))
        self.trunks, self.tutorial, self.graphs = {}, {}, {}
        if self.first:
            for kind in (AS_IS, FUSED):
                self.trunks[kind] = make_trunk(network.backbone, network.taps, self.example, kind, network.reading)
            for size in (None, *sizes):
                made = TutorialPipeline(network.backbone, device, second, size or len(self.example))
                self.tutorial[size] = made.eval()

    def wait(self) -> None:
        """Wait for the devices that work for this process."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def capture(self) -> None:
        """Capture afresh all that is captured in this process."""
        self.wait()
        time.sleep(_SETTLE_S)
        for runner in self.runners.values():
            runner.stage.capture()
        self.graphs.clear()
        for kind, trunk in self.trunks.items() if self.example.is_cuda else ():
            for batch in {case.batch for case in self.cases}:
                with trunk.choosing(batch):
                    self.graphs[batch, kind] = GraphedPeer(partial(self._alone, kind), self.example[:batch])

    @torch.no_grad()
    def _alone(self, kind: str, x: Tensor) -> PeerAnswer:
        return bare(self.trunks[kind], self.subject.network.taps, x)

    def call_of(self, case: Case) -> Callable[[Tensor], Any]:
        """Return what this process calls in a case: to answer, to take part in it, or to do nothing."""
        runner = self.runners.get((case.variant, case.split_size or 0))
        if runner is not None:
            return runner if runner.is_first else lambda _x: runner(None)
        if not self.first:
            return lambda _x: None
        if case.variant.startswith("one-gpu"):
            return self.graphs.get((case.batch, case.trunk), partial(self._alone, case.trunk))
        return self.tutorial[case.split_size]

    def answer_of(self, case: Case, x: Tensor) -> ExitResult:
        """Return the answer of the first process in a case, on the device of ``x``."""
        found = self.call_of(case)(x)
        if isinstance(found, Tensor):
            found = PeerAnswer([], found.to(x.device).clone(), len(self.subject.network.taps))
        found = merged_answer(found)
        if case.variant == "pipelined-one-head":  # whose classifier is exit 1
            found = found._replace(exit_index=found.exit_index + len(self.subject.network.taps) - 1)
        return found

    def check(self) -> dict[Case, dict[str, int]]:
        """Compare answers with the eager network's; raises ``WrongAnswer``, and returns counts in the first process."""
        network, inputs, counts = self.subject.network, self.subject.inputs, {}
        rounding = measure_rounding(network, [self.example[:_ROUNDING_SAMPLES]])
        for case in self.cases:
            comparison, given = Comparison(), [x[: case.batch] for x in inputs]
            if self.first:
                truth = EagerTruth(network, self.trunks[case.trunk], given, rounding)
                truth.compare(partial(self.answer_of, case), comparison)
                counts[case] = comparison.counts()
                refuse(wrong_in_words(counts[case]))
            else:
                for x in given:
                    self.call_of(case)(x)
        return counts

    def time(self, captures: int, rounds: int) -> dict[Case, list[list[float]]]:
        """Time single requests in turns, each after an untimed one; microseconds, [captures][rounds]."""
        order = random.Random(0)  # the same in all processes
        us: dict[Case, list[list[float]]] = {case: [] for case in self.cases}
        for _ in range(captures):
            self.capture()
            for times in us.values():
                times.append([])
            for turn in range(-(-rounds // captures)):
                for case in order.sample(self.cases, len(self.cases)):
                    call, x = self.call_of(case), self.subject.inputs[turn % len(self.subject.inputs)][: case.batch]
                    call(x)
                    self.wait()
                    us[case][-1].append(time_request(call, x, wait=self.wait)[1])
        return us


def measure(
    cell: Cell, cases: Sequence[Case], device: torch.device, rank: int, captures: int, rounds: int
) -> Iterator[Record]:
    """Measure together with the other process of the default group; the first one gets the records."""
    sizes = [case.split_size for case in cases if case.split_size is not None]
    with ExitStack() as opened:
        subject = build_subject(cell, device)
        opened.enter_context(fastest_convolutions(max(sizes)))
        opened.enter_context(subject.exits(NEVER))
        study = Study(subject, rank, cases, opened)
        study.capture()
        counts, us = study.check(), study.time(captures, rounds)
    protocol = {"rounds": rounds, "captures": captures, "devices": 2, "cut": CUT}
    protocol |= {"order": "shuffled each round, an untimed request before each"}
    run, around = secrets.token_hex(6), {**environment(device), "clocks": clocks(device)}
    for case in cases if rank == 0 else ():
        images_s = summary([[case.batch / one * 1e6 for one in times] for times in us[case]])
        yield Record(
            "pipeline", dataclasses.replace(cell, batch=case.batch).as_json(), case.name, run, around,
            protocol={**protocol, "processes": 2 if case.variant.startswith("pipelined") else 1},
            host_us=as_json(summary(us[case])), correctness=counts[case],
            measured=as_json({"images_s": images_s, "batch": case.batch, "split_size": case.split_size}),
        )  # fmt: skip


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option()],
    model: str = "resnet50",
    dtype: str = "float16",
    classes: int = 1000,
    batch: Annotated[list[int] | None, typer.Option(show_default="120, 512")] = None,
    split_size: Annotated[list[int] | None, typer.Option(show_default="20, 40, 64, 128")] = None,
    pixels: int = 224,
    captures: int = 5,
    rounds: int = 15,
    device: str = "cuda",
) -> None:
    """Measure as one of the two processes, which get the same options."""
    rank = int(os.environ["RANK"])

    def own_device() -> torch.device:
        return torch.device(device) if device != "cuda" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))

    def backend(where: torch.device) -> str:
        if where.type != "cuda":
            return "gloo"
        torch.cuda.set_device(where)
        return "cpu:gloo,cuda:nccl"

    batches, split_sizes = batch or [120, 512], split_size or [20, 40, 64, 128]
    cell = dataclasses.replace(resnet_cell(model, dtype, max(batches), classes, "stages"), input=(3, pixels, pixels))
    cases = cases_of(batches, split_sizes)
    with one_line_errors(BadRecord):
        check_out(out)
        with joined_processes(backend, own_device, {"cases": str(cases)}) as where:
            for record in measure(cell, cases, where, rank, captures, rounds):
                append_record(out, record)


if __name__ == "__main__":
    app()
