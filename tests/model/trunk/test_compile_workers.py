"""Parts of a trunk are compiled beside this process, which finds them in Inductor's caches."""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from auxhead.model.auto import candidates
from auxhead.model.auto.candidates import SharedTrunks
from auxhead.model.trunk import compile_workers
from auxhead.model.trunk.compile_workers import CompileWorkers, compiling_beside, workers_for
from auxhead.model.trunk.compiled_part import Kind, compile_graph
from support.example_models import SmallNet, needs_gpu
from support.planner_fakes import FakeTrunk
from support.trunk_cases import assert_same, made


class Noting:
    """Workers that note what they are given."""

    def __init__(self) -> None:
        self.given: list[tuple[bytes, Sequence[Kind]]] = []
        self.waited = 0

    def take(self, graph: bytes, kinds: Sequence[Kind]) -> None:
        self.given.append((graph, kinds))

    def wait(self) -> None:
        self.waited += 1


def test_parts_are_given_away_before_they_are_compiled(monkeypatch) -> None:
    compiled = []

    def compiler(graph, inputs, options):
        compiled.append([(x.shape, x.stride(), x.dtype, x.device) for x in inputs])
        return graph

    monkeypatch.setattr("torch._inductor.compile", compiler)
    workers, backbone, x = Noting(), SmallNet().eval(), torch.randn(2, 3, 12, 12)
    with compiling_beside(workers):
        trunk = made(backbone, SmallNet.taps, x, "inductor")
    assert len(workers.given) == len(compiled) == 3 and workers.waited == 1
    for (graph, kinds), again in zip(workers.given, list(compiled), strict=True):
        assert list(kinds) == again
        compile_graph(graph, kinds)
        assert compiled.pop() == again, "a worker asks for the same"
    assert_same(trunk, backbone, SmallNet.taps, x)


@pytest.fixture
def worker() -> Iterator[CompileWorkers]:
    workers = CompileWorkers(1)
    yield workers
    folder = Path(workers._folder.name)
    workers.close()
    assert not folder.exists() and all(each.poll() is not None for each in workers._workers)


def test_what_a_worker_cannot_do_is_left_undone(worker) -> None:
    worker.take(b"no graph", [])
    worker.take(pickle.dumps(os.getcwd), [])
    worker.wait()
    worker.wait()  # for nothing
    worker._workers[0].kill()
    worker._workers[0].wait()
    worker.take(b"", [])
    worker.take(b"", [])
    worker.wait()


def test_graphs_that_cannot_be_handed_over_are_left(worker) -> None:
    shutil.rmtree(worker._folder.name)
    worker.take(b"", [])
    worker.wait()


@pytest.mark.parametrize("executable", ["", None, "once"], ids=str)
def test_fewer_workers_than_wanted(executable, monkeypatch) -> None:
    """A process that embeds Python has no interpreter to start, and memory may be too little for a second one."""
    start = subprocess.Popen

    def starts_one(*args, **options):
        monkeypatch.setattr(sys, "executable", None)
        return start(*args, **options)

    if executable == "once":
        monkeypatch.setattr(subprocess, "Popen", starts_one)
    else:
        monkeypatch.setattr(sys, "executable", executable)
    workers = CompileWorkers(3)
    try:
        assert len(workers._workers) == (executable == "once")
        workers.take(b"", [])
        workers.wait()
    finally:
        workers.close()


def test_workers_want_processors_and_memory(monkeypatch) -> None:
    assert workers_for(torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80e9, 80e9))
    for processors, count in ((range(2), 0), (range(9), 2), (range(64), 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, processors=processors: set(processors), raising=False)
        assert workers_for(torch.device("cuda", 0)) == count
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2e9, 80e9))
    assert workers_for(torch.device("cuda", 0)) == 0


def test_workers_are_for_who_compiles(monkeypatch) -> None:
    begun, ended = [], []

    class Workers(Noting):
        def __init__(self, count: int) -> None:
            super().__init__()
            begun.append(count)

        def close(self) -> None:
            ended.append(self)

    monkeypatch.setattr(candidates, "workers_for", lambda _: 3)
    monkeypatch.setattr(candidates, "CompileWorkers", Workers)
    x = torch.randn(2, 3, 12, 12)
    for asked in ("as_is", "cudnn"):
        SharedTrunks(None, x, asked, {}).expect_compiling()  # type: ignore[arg-type]
    known = {"inductor": FakeTrunk(None, "inductor", (), False)}
    SharedTrunks(None, x, "auto", known).expect_compiling()  # type: ignore[arg-type]
    assert not begun
    trunks = SharedTrunks(None, x, "auto", {})  # type: ignore[arg-type]
    trunks.expect_compiling()
    trunks.close()
    trunks.close()
    assert begun == [3] and len(ended) == 1
    SharedTrunks(None, x, "auto", {}).close()  # type: ignore[arg-type]


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_gpu)])
def test_what_workers_compile_is_found(mark, tmp_path, monkeypatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    backbone, x = SmallNet().cuda().eval(), torch.randn(2, 3, 12, 12, device="cuda")
    workers = CompileWorkers(2)
    counters.clear()
    try:
        with compiling_beside(workers):
            trunk = made(backbone, SmallNet.taps, x, "inductor")
    finally:
        workers.close()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 3
    assert_same(trunk, backbone, SmallNet.taps, x)
    assert compile_workers._current.get() is None
