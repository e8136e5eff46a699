"""``compile_graph``: compiles a traced graph by Inductor, for CUDA graphs that a runner captures."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import fx

from ...kernels.early_start import can_start_early
from ..basics.machine import package_version
from .layer_graph import TRACES

#: Shape, strides, dtype and device of a tensor.
Kind = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]
#: The runner captures the graphs, and launches begin early by :func:`beginning_early` alone.
OPTIONS: dict[str, Any] = {"triton.cudagraphs": False, "triton.enable_pdl": False}
#: By which caches know what was compiled within :func:`beginning_early`; another one wherever that changes.
EARLY_TAG = "auxhead: waits first, 1"


class TracedGraph(NamedTuple):
    """All that Inductor compiles a graph for."""

    graph: bytes
    """Of PyTorch's operators, as bytes: caches know it again by what comes out of them, in any process."""
    kinds: Sequence[Kind]
    """Those of its inputs."""
    begins_early: bool
    """True if its launches begin as :func:`beginning_early` has it."""


def keep_triton_cache() -> str | None:
    """Let this process find kernels in Triton's cache as before once Inductor compiles, too.

    Inductor sets another folder, and PyTorch's assembler in place of Triton's, whose version is a part of what kernels
    are known by and is asked for once. A process that launches behind that what another one compiled before it, or the
    other way around, would find nothing, and compile all of it again.

    Returns:
        The version of the assembler, None if there is no Triton for this platform.
    """
    try:
        from triton import knobs
        from triton.backends.nvidia.compiler import get_ptxas_version
    except ImportError:
        return None
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
    version: str = get_ptxas_version(10 * major + minor)
    return version


def compile_graph(traced: TracedGraph) -> Callable[..., Any]:
    """Compile a graph, or find it in Inductor's caches."""
    from torch._dynamo.utils import counters
    from torch._guards import TracingContext, tracing
    from torch._inductor import compile as inductor  # takes a second
    from torch._inductor import config

    mark, cached = mark_of(traced), counters["aot_autograd"]
    before = cached["autograd_cache_hit"] + cached["autograd_cache_saved"]
    mode, fakes = fakes_of(traced.kinds)
    with (
        TRACES,  # it traces, too
        torch.inference_mode(False),  # which switches gradients on
        torch.no_grad(),
        tracing(TracingContext(mode)),
        formats_by_name(),
        # What caches hold is loaded here: the processes that compile kernels take longer to begin.
        config.patch(compile_threads=1) if mark.exists() else nullcontext(),
        beginning_early() if traced.begins_early else nullcontext(),
    ):
        compiled: Callable[..., Any] = inductor(_graph_of(traced.graph, mode), fakes, options=OPTIONS)
    if cached["autograd_cache_hit"] + cached["autograd_cache_saved"] > before:
        with suppress(OSError):  # no room
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return compiled


@contextmanager
def formats_by_name() -> Iterator[None]:
    """Let Inductor's caches know memory formats by their names alone, in this context and all threads.

    Python pickles them as what the first module has that imports torch, another one in each program: what a worker has
    compiled would be found by none whose program has a module of its own.
    """
    from torch._inductor.codecache import FxGraphCachePickler

    begin = FxGraphCachePickler.__init__

    def begin_by_name(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        self.dispatch_table[torch.memory_format] = lambda memory_format: (str, (f"{memory_format}",))

    FxGraphCachePickler.__init__ = begin_by_name  # type: ignore[method-assign]
    try:
        yield
    finally:
        FxGraphCachePickler.__init__ = begin  # type: ignore[method-assign]


@contextmanager
def beginning_early() -> Iterator[None]:
    """Let Inductor's kernels begin while the launch before them ends, and wait for that first, in this context.

    Inductor has an option for this, ``triton.enable_pdl``, which is one for all threads, and with which a kernel reads
    before it waits what the launch before has not written. But that launch need not have waited itself for those before
    it, if it reads nothing. What other threads compile meanwhile is as ever.
    """
    from torch._inductor.codegen.triton import TritonKernel
    from torch._inductor.select_algorithm import TritonTemplateKernel
    from torch._inductor.virtualized import V
    from torch.compiler import config

    enabled, filter_waits, mine = TritonKernel._enable_pdl_codegen, TritonKernel._filter_pdl, get_ident()

    def enabled_here() -> bool:
        if get_ident() != mine:
            return enabled()
        return not isinstance(V.kernel, TritonTemplateKernel) and can_start_early(V.graph.get_current_device_or_throw())

    def wait_first(self: Any, code: Any) -> None:
        filter_waits(self, code)
        if get_ident() == mine and enabled_here():
            others = [line for line in code._lines if not (isinstance(line, str) and self.GDC_WAIT in line)]
            code._lines = [self.GDC_WAIT, *others]

    TritonKernel._enable_pdl_codegen = staticmethod(enabled_here)  # type: ignore[method-assign]
    TritonKernel._filter_pdl = wait_first  # type: ignore[method-assign]
    try:
        with config.patch(cache_key_tag=f"{config.cache_key_tag}{EARLY_TAG}"):  # type: ignore[attr-defined]
            yield
    finally:
        TritonKernel._enable_pdl_codegen = staticmethod(enabled)  # type: ignore[method-assign]
        TritonKernel._filter_pdl = filter_waits  # type: ignore[method-assign]


#: Those of deterministic algorithms and of matrix products, in order, Inductor's by name, and the user's tag of caches.
Settings = tuple[tuple[bool, bool, bool], tuple[str, Any, Any], dict[str, Any], str]


def settings() -> Settings:
    """Return what Inductor's caches know a graph again by, beside the graph: settings of this process."""
    from torch._inductor import config
    from torch.compiler import config as caches

    deterministic: Any = torch.utils.deterministic
    matmul = torch.backends.cuda.matmul
    fills = deterministic.fill_uninitialized_memory
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    reduced = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction
    kept = config.save_config_portable(ignore_private_configs=False)
    return (*algorithms, fills), (matmul.fp32_precision, *reduced), kept, caches.cache_key_tag


@contextmanager
def set_as(given: Settings) -> Iterator[None]:
    """Let settings be as in the process that has read them."""
    from torch._inductor import config
    from torch.compiler import config as caches

    (enabled, warn_only, fills), (precision, half, brain), kept, tag = given
    deterministic: Any = torch.utils.deterministic
    matmul = torch.backends.cuda.matmul
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    deterministic.fill_uninitialized_memory = fills
    matmul.fp32_precision = precision
    matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction = half, brain
    with config.patch(kept), caches.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
        yield


def mark_of(graph: TracedGraph) -> Path:
    """Return the file that is there once caches hold what a graph is compiled to; it goes with Inductor's, beside them.

    It holds nothing.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    gpus = [torch.cuda.get_device_name(device) for *_, device in graph.kinds if device.type == "cuda"]
    versions = torch.__version__, torch.version.cuda, package_version("triton"), gpus[:1]
    others = graph._replace(graph=b""), EARLY_TAG, settings(), versions
    return Path(cache_dir()) / "auxhead" / hashlib.sha256(graph.graph + repr(others).encode()).hexdigest()


def as_bytes(graph: fx.GraphModule) -> bytes:
    """Return a graph as bytes, node by node.

    Unpickled in the usual way it would be traced again: what has no inputs would run then, once for all calls, and a
    tensor of zeros that is added to would hold the sum of all.
    """
    from torch.fx._graph_pickler import GraphPickler, Options

    graph.meta = {}
    return GraphPickler.dumps(graph, Options(ops_filter=None, node_metadata_key_filter=lambda key: False))


def _graph_of(data: bytes, mode: Any) -> fx.GraphModule:
    from torch.fx._graph_pickler import GraphPickler

    graph = GraphPickler.loads(data, mode)
    assert isinstance(graph, fx.GraphModule)
    graph.recompile()
    return graph


def fakes_of(kinds: Sequence[Kind]) -> tuple[Any, list[Any]]:
    """Return tensors without memory, as Dynamo has them: without an environment of shapes nothing is cached."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode:
        return mode, [
            torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in kinds
        ]
