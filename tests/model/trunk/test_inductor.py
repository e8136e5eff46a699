"""What Inductor compiles for trunks: how caches know it again, and what its kernels begin with."""

import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from auxhead.model.trunk.inductor import (
    EARLY_TAG,
    TracedGraph,
    as_bytes,
    beginning_early,
    compile_graph,
    formats_by_name,
    mark_of,
)
from auxhead.model.trunk.trunk import make_trunk
from support.example_models import SmallNet
from torch.compiler import config


def test_caches_know_layouts_by_the_same_name_in_any_program() -> None:
    """And not as what the first of this program's modules has that imports torch."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCachePickler

    part = torch.fx.symbolic_trace(torch.nn.Identity())
    with formats_by_name():
        pickled = AOTAutogradCachePickler(part).dumps({"layout": torch.channels_last})
        assert b"torch.channels_last" in pickled and pickle.loads(pickled) == {"layout": "torch.channels_last"}
    assert pickle.loads(AOTAutogradCachePickler(part).dumps(torch.channels_last)) is torch.channels_last


def test_what_caches_hold_is_loaded_here_and_marked_as_such(tmp_path, monkeypatch) -> None:
    """The processes that compile kernels take seconds to begin, of which what is only loaded has no need."""
    from torch._dynamo.utils import counters
    from torch._inductor import config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "not there yet"))
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    kind = torch.Size([2]), (1,), torch.float32, torch.device("cpu")
    traced = TracedGraph(as_bytes(torch.fx.GraphModule({}, graph)), (kind,), begins_early=True)
    threads: list[int] = []
    for counted, is_marked in ((None, False), ("autograd_cache_miss", False), ("autograd_cache_saved", True)):

        def compiler(graph, _inputs, options, counted=counted):
            threads.append(inductor.compile_threads)
            counters["aot_autograd"][counted] += 1
            return graph

        monkeypatch.setattr("torch._inductor.compile", compiler)
        with inductor.patch(compile_threads=5):
            compile_graph(traced)
        assert mark_of(traced).exists() == is_marked
    with inductor.patch(compile_threads=5):
        compile_graph(traced)
    assert threads == [5, 5, 5, 1]


def test_kernels_are_known_by_the_assembler_that_was_there_before_inductor_sets_another(monkeypatch) -> None:
    """Though that runs first in the process: else it would find nothing of what others compile, and compile again."""
    triton = pytest.importorskip("triton.backends.nvidia.compiler")
    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    triton.get_ptxas_version.cache_clear()
    try:
        make_trunk(SmallNet().eval(), [], torch.ones(1, 3, 8, 8), "inductor")
        assert triton.get_ptxas_version.cache_info().currsize == 1
    finally:
        triton.get_ptxas_version.cache_clear()


def test_kernels_are_kept_in_the_folder_that_triton_has_without_inductor(monkeypatch) -> None:
    """Else those that are launched before Inductor's and behind them lie in two, and each process finds some."""
    knobs = pytest.importorskip("triton.knobs")
    from torch._inductor.runtime.cache_dir_utils import triton_cache_dir

    monkeypatch.setattr("torch._inductor.compile", lambda graph, _inputs, options: graph)
    for own in (None, "/a/folder/of/the/users"):
        monkeypatch.setenv("TRITON_CACHE_DIR", own or "")
        if own is None:
            monkeypatch.delenv("TRITON_CACHE_DIR")
        before = knobs.cache.dir
        make_trunk(SmallNet().eval(), [], torch.ones(1, 3, 8, 8), "inductor")
        assert triton_cache_dir(0) == knobs.cache.dir == before == (own or before)


@pytest.mark.parametrize("begins", [["read"], ["read", "wait", "launch", "read", "wait", "launch"], []], ids=len)
def test_inductors_kernels_begin_with_the_wait(begins, monkeypatch) -> None:
    """As they are written for GPUs: the wait before all else; the next launch begins behind the last that is read.

    What another thread compiles meanwhile is as ever.
    """
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.utils import IndentedBuffer
    from torch._inductor.virtualized import V

    monkeypatch.setattr("auxhead.model.trunk.inductor.can_start_early", lambda device: device.type == "cuda")
    lines = {"wait": TritonKernel.GDC_WAIT, "launch": TritonKernel.GDC_LAUNCH, "read": "x = tl.load(y)"}
    kernel, body, of_another = TritonKernel.__new__(TritonKernel), IndentedBuffer(), IndentedBuffer()
    body.writelines([*map(lines.get, begins), "tl.store(z, x)"])
    of_another.writeline("tl.store(z, x)")
    graph = SimpleNamespace(get_current_device_or_throw=lambda: torch.device("cuda"))
    with ThreadPoolExecutor(1) as another, V.set_graph_handler(graph):
        with beginning_early():
            assert kernel._enable_pdl_codegen() and not another.submit(kernel._enable_pdl_codegen).result()
            kernel._filter_pdl(body)
            another.submit(kernel._filter_pdl, of_another).result()
        assert not kernel._enable_pdl_codegen()
    launch = [lines["launch"]] * ("launch" in begins)
    assert body._lines == [lines["wait"], *[lines["read"]] * begins.count("read"), *launch, "tl.store(z, x)"]
    assert of_another._lines == ["tl.store(z, x)"]


def test_caches_know_what_begins_early_by_a_tag() -> None:
    """Else they would hand over kernels without the wait, compiled by the user with Inductor's own option."""
    with config.patch(cache_key_tag="mine"):
        with beginning_early():
            assert config.cache_key_tag == f"mine{EARLY_TAG}"
        assert config.cache_key_tag == "mine"
