"""Parts of a trunk are compiled beside this process, which finds them in Inductor's caches."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from auxhead.model import EarlyExitNetwork, FusedAuxHead, make_runner
from auxhead.model.auto import candidates
from auxhead.model.auto.candidates import SharedTrunks
from auxhead.model.auto.compiled_backbone import CompiledBackbone
from auxhead.model.trunk.backbone_rewriter import whole
from auxhead.model.trunk.compile_workers import CompileWorkers, workers_for
from auxhead.model.trunk.compiled_part import Compiled
from auxhead.model.trunk.inductor import TracedGraph, as_bytes, compile_graph, mark_of, set_as, settings
from auxhead.model.trunk.trunk import begin_trunk
from support.example_models import SmallNet
from support.planner_fakes import FakeTrunk
from support.trunk_cases import assert_same
from torch import nn


class Noting:
    """Workers that note what they are given."""

    def __init__(self) -> None:
        self.given: list[TracedGraph] = []

    def take(self, graph: TracedGraph, _compiled: Compiled) -> None:
        self.given.append(graph)


def test_parts_are_given_away_before_they_are_compiled(monkeypatch) -> None:
    compiled = []

    def compiler(graph, inputs, options):
        compiled.append([(x.shape, x.stride(), x.dtype, x.device) for x in inputs])
        return graph

    monkeypatch.setattr("torch._inductor.compile", compiler)
    workers, backbone, x = Noting(), SmallNet().eval(), torch.randn(2, 3, 12, 12)
    finish = begin_trunk(backbone, SmallNet.taps, x, "inductor", hand_over=workers.take)
    assert len(workers.given) == 3 and not compiled
    trunk = finish()
    assert len(compiled) == 3 and trunk.module is not backbone
    for graph, again in zip(workers.given, list(compiled), strict=True):
        assert list(graph.kinds) == again and graph.begins_early
        compile_graph(graph)
        assert compiled.pop() == again, "a worker asks for the same"
    assert_same(trunk, backbone, SmallNet.taps, x)


def test_parts_find_what_was_loaded_meanwhile(monkeypatch) -> None:
    backbone, x, count = SmallNet().eval(), torch.randn(2, 3, 12, 12), 0

    def compiler(graph, _inputs, options):
        nonlocal count
        count += 1
        return graph

    def load(graph: TracedGraph, compiled: Compiled) -> None:
        compiled[graph] = compile_graph(graph)

    monkeypatch.setattr("torch._inductor.compile", compiler)
    trunk = begin_trunk(backbone, SmallNet.taps, x, "inductor", hand_over=load)()
    assert count == 3
    assert_same(trunk, backbone, SmallNet.taps, x)


def test_settings_go_along() -> None:
    """Or what workers have compiled would not be found, wherever one is not as a new process has it."""
    from torch._inductor import config
    from torch.compiler import config as caches

    here, matmul = settings(), torch.backends.cuda.matmul
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.set_float32_matmul_precision("high")
        matmul.allow_fp16_reduced_precision_reduction = False
        with config.patch(epilogue_fusion=False), caches.patch(cache_key_tag="mine"):
            given = pickle.loads(pickle.dumps(settings()))
    finally:
        torch.set_float32_matmul_precision("highest")
        with set_as(here):
            assert settings() == here
    assert here != given
    with set_as(given):
        assert settings() == given and not config.epilogue_fusion and caches.cache_key_tag == "mine"
    with set_as(here):
        assert settings() == here and config.epilogue_fusion


def nothing(data: bytes = b"no graph") -> TracedGraph:
    """What nobody can compile."""
    return TracedGraph(data, (), begins_early=False)


def given(workers: CompileWorkers) -> list[int]:
    """Graphs that each worker has not answered yet."""
    return [*map(len, workers._given)]


@pytest.fixture
def worker() -> Iterator[CompileWorkers]:
    workers = CompileWorkers(1)
    yield workers
    folder, processes = Path(workers._folder.name), [*workers._workers]
    for _ in range(2):
        workers.close()
    assert not folder.exists() and all(each.poll() is not None for each in processes)


def test_what_a_worker_cannot_do_is_left_undone(worker) -> None:
    worker.take(nothing(), {})
    worker.take(nothing(pickle.dumps(os.getcwd)), {})
    assert worker.wait(0.0) is False, "it is still beginning"
    for _ in range(2):
        assert worker.wait() is False, "neither is a graph"
    worker._workers[0].kill()
    worker._workers[0].wait()
    for data in (b"", b"nor this"):
        worker.take(nothing(data), {})
    assert worker.wait() is False and given(worker) == [0]


def test_the_same_graph_is_given_once(worker) -> None:
    kind = (torch.Size([2]), (1,), torch.float32, torch.device("cpu"))
    for graph in 2 * [nothing(), nothing()._replace(kinds=(kind,)), nothing()._replace(begins_early=True)]:
        worker.take(graph, {})
    assert given(worker) == [3]


def test_what_is_compiled_is_given_to_nobody(worker, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    mark = mark_of(nothing())
    mark.parent.mkdir()
    mark.touch()
    worker.take(nothing(), {})
    assert given(worker) == [0] and worker.wait(0.0)
    with torch._inductor.config.patch(epilogue_fusion=False):  # which is compiled otherwise
        worker.take(nothing(), {})
    assert given(worker) == [1]


def test_what_a_worker_has_compiled_is_loaded_and_marked(tmp_path, monkeypatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops.aten.mm.default, (x, x)),))  # a library's, for which no C++ is compiled
    data = as_bytes(torch.fx.GraphModule(torch.nn.Module(), graph))
    kinds = ((torch.Size([2, 2]), (2, 1), torch.float32, torch.device("cpu")),)
    traced = TracedGraph(data, kinds, begins_early=True)
    counters.clear()
    for count in (1, 0):
        workers, compiled = CompileWorkers(1), {}
        try:
            workers.take(traced, compiled)
            assert given(workers) == [count] and workers.wait() and given(workers) == [0]
        finally:
            workers.close()
        assert not workers.wait() and len(compiled) == count
        for call in compiled.values():
            x = torch.randn(2, 2)
            assert torch.equal(call(x)[0], x @ x)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert [*(tmp_path / "auxhead").iterdir()] == [mark_of(traced)]


def test_what_a_worker_has_forked_ends_with_it() -> None:
    workers = CompileWorkers(1)
    try:
        workers.take(nothing(), {})
        workers.wait()  # by then it has forked
        pid = workers._workers[0].pid
        forked = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    finally:
        workers.close()
    assert forked
    while any(is_running(child) for child in forked):  # a signal takes a moment
        time.sleep(0.01)


def is_running(pid: str) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_graphs_that_cannot_be_handed_over_are_left(worker) -> None:
    shutil.rmtree(worker._folder.name)
    worker.take(nothing(), {})
    assert given(worker) == [0] and worker.wait()
    Path(worker._folder.name).mkdir()
    worker.take(nothing(), {})
    assert given(worker) == [1]


def test_workers_know_kernels_as_this_process_does(tmp_path) -> None:
    """Though Inductor, which begins each of them, sets another assembler before Triton asks for its version."""
    nvidia = pytest.importorskip("triton.backends.nvidia.compiler")
    (another := tmp_path / "ptxas").write_text("#!/bin/sh\necho Cuda compilation tools, release 99.9, V99.9.9\n")
    another.chmod(0o755)
    workers = CompileWorkers(1)
    try:
        environment = Path(f"/proc/{workers._workers[0].pid}/environ").read_bytes().decode().split("\0")
    finally:
        workers.close()
    here = nvidia.get_ptxas_version(90)
    code = "from triton.backends.nvidia.compiler import get_ptxas_version as version; print(version(90), end='')"
    theirs = {**os.environ, **dict(one.split("=", 1) for one in environment if one), "TRITON_PTXAS_PATH": str(another)}
    assert subprocess.run([sys.executable, "-c", code], env=theirs, capture_output=True, text=True).stdout == here


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
        workers.take(nothing(), {})
        workers.wait()
    finally:
        workers.close()


def test_workers_want_processors_and_memory(monkeypatch) -> None:
    assert workers_for(torch.device("cpu")) == 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80e9, 80e9))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * 2**18}.get)
    for processors, count in ((range(2), 0), (range(9), 2), (range(17), 4), (range(64), 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, processors=processors: set(processors), raising=False)
        assert workers_for(torch.device("cuda", 0)) == count
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * 2**18}.get)
    assert workers_for(torch.device("cuda", 0)) == 0
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * 2**18}.get)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2e9, 80e9))
    assert workers_for(torch.device("cuda", 0)) == 0


def test_workers_are_for_who_compiles(monkeypatch) -> None:
    begun, ended = [], []

    class Workers(Noting):
        def __init__(self, count: int, patient: bool = False) -> None:
            super().__init__()
            begun.append((count, patient))

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
    assert begun == [(3, False), (1, True)] and len(ended) == 2
    SharedTrunks(None, x, "auto", {}).close()  # type: ignore[arg-type]


class Late(Noting):
    """Workers that come to no end."""

    def wait(self, until: float = 0.0) -> bool:
        return False

    def close(self) -> None:
        pass


def test_the_backbone_alone_is_compiled_beside_if_one_trace_holds(monkeypatch) -> None:
    x = torch.randn(2, 3, 12, 12)
    network = EarlyExitNetwork(SmallNet(), {"block1": FusedAuxHead(12, 5)}, example_input=x).eval()
    trunks = SharedTrunks(network, x, "auto", {})
    trunks._workers, trunks._beside = Late(), (late := Late())  # type: ignore[assignment]
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    trunks.begin_compiling()
    trunks.get("inductor")
    assert len(late.given) == 1 and trunks.compiled_backbone(x, 0.0) is None
    assert torch.equal(trunks._whole(x), network.backbone(x))
    counting = SmallNet().eval()
    counting.block1.register_forward_hook(lambda *_: None)
    assert whole(network.backbone) is not None and whole(counting) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
def test_what_it_gains_over_torch_compile_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(candidates, "workers_for", lambda _: 1)
    x = torch.randn(2, 3, 32, 32, device="cuda")
    network = EarlyExitNetwork(SmallNet(), {"block1": FusedAuxHead(12, 5)}, example_input=x.cpu()).cuda().eval()
    with make_runner(network, x, plan=None, budget="thorough") as runner:
        assert "than torch.compile of the backbone alone, in a graph (" in runner.describe()
        torch.testing.assert_close(runner(x).confidence, network(x).confidence, atol=1e-2, rtol=1e-2)
    alone = CompiledBackbone(torch.compile(network.backbone), network.backbone, x)
    for _ in range(2):
        torch.testing.assert_close(alone(x), network.backbone(x), atol=1e-2, rtol=1e-2)
        x.normal_()
    alone.wait_until_idle()
    alone.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
def test_what_workers_compile_is_found(tmp_path, monkeypatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    backbone, x = SmallNet().cuda().eval(), torch.randn(2, 3, 12, 12, device="cuda")
    for block in (backbone.block0, backbone.block1):
        block.append(nn.Softmax(1))  # of which Inductor makes a kernel
    head = FusedAuxHead(12, 5).cuda().eval()
    head(torch.randn(2, 12, 6, 6, device="cuda"))  # Triton asks for its assembler before Inductor sets another one
    workers = CompileWorkers(2)
    counters.clear()
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            finish = begin_trunk(backbone, SmallNet.taps, x, "inductor", hand_over=workers.take)
            assert workers.wait()
            trunk = finish()
            before = given(workers)
            begin_trunk(backbone, SmallNet.taps, x, "inductor", hand_over=workers.take)
            assert given(workers) == before, "they are marked"
    finally:
        workers.close()
    assert counters["aot_autograd"]["autograd_cache_hit"] == 3
    kernels = [kernel_of(path) for path in (tmp_path / "triton").rglob("*.cubin")]
    assert len({*kernels}) == len(kernels) > 1, "one was compiled twice"
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        assert_same(trunk, backbone, SmallNet.taps, x)


def kernel_of(cubin: Path) -> tuple[object, ...]:
    """Return what a kernel in Triton's cache was compiled from, and with which options."""
    options = json.loads(cubin.with_suffix(".json").read_text())
    return cubin.name, cubin.with_suffix(".ttir").read_text(), options["num_warps"], options["num_stages"]
