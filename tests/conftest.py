"""Fixtures of all tests: devices, fixed seeds, empty tuned tables, memory that shows when nothing wrote it."""

import gc
import importlib
import importlib.util
import itertools
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["support.pretended_gpu"]
# As where auxhead is installed: transformers takes a folder `kernels` on the path for Hugging Face's package.
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).resolve().parents[1]]
if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers have the cores: threads of each would mostly spin until those of another one are done.
    torch.set_num_threads(1)

pytest.register_assert_rewrite("support")  # helpers tell values, too
HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Read when the kernels are imported: without a GPU the kernels themselves then run, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile(
    "auxhead",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("auxhead")


def pytest_configure(config):
    if not HAS_CUDA and importlib.util.find_spec("triton"):  # there is none for some platforms
        from support.quick_interpreter import quicken

        if not quicken():
            warnings.warn("Triton's interpreter is not known in this version, and left as slow as it is", stacklevel=1)
    config.addinivalue_line("markers", "long: takes seconds in Triton's interpreter; skipped on the CPU")
    # Triton's interpreter and NumPy: not ours to fix, and thousands of lines
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore:invalid value encountered in reduce:RuntimeWarning")
    config.addinivalue_line(
        "filterwarnings",
        r"ignore:.* encountered in .*:RuntimeWarning:(triton\.runtime\.interpreter|support\.quick_interpreter)",
    )


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One more than cores: tests that wait for processes of their own leave some of them idle."""
    return (yield) + 1


class _GpuModule(pytest.Module):
    """Tests of a GPU where there is none: imported and collected, and skipped in one go."""

    def collect(self):
        super().collect()
        pytest.skip("needs a CUDA device")


def pytest_pycollect_makemodule(module_path, parent):
    if not HAS_CUDA and module_path.stem.endswith("_gpu"):
        return _GpuModule.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(items):
    """Leave the doctor's tests to the end: they switch torch's trace of CUDA on, which nothing switches off.

    While it is on, an error of an operator becomes "SystemError: error return without exception set" if the operator
    frees memory on its way out (torch 2.11), in torch.library.opcheck, too, which means to catch it.
    """
    items.sort(key=lambda item: item.path.parent.name == "doctor")


def pytest_collection_finish():
    gc.freeze()  # thousands of tests, and PyTorch, stay: to look them over at each collection takes seconds


def pytest_runtest_setup(item):
    if item.get_closest_marker("long") and item.callspec.params.get("device") == "cpu":
        pytest.skip("takes seconds in the interpreter, where smaller ones do the same")


@pytest.fixture(params=["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] * HAS_CUDA)], scope="session")
def device(request):
    """Each device in turn: the kernel in Triton's interpreter (the reference where a GPU is present), or compiled."""
    return torch.device("cuda", torch.cuda.current_device()) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(scope="module")
def without_interpreter():
    """On the CPU let the reference answer, as it does for users: a whole data set is too much for the interpreter."""
    modules = [importlib.import_module(name) for name in ("auxhead.kernels.fused_head", "auxhead.model.heads.repeats")]
    runs_triton = modules[0].runs_triton
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(module, "runs_triton", lambda x: x.is_cuda and runs_triton(x))
        yield


@pytest.fixture(scope="module")
def undrawn():
    """Pictures are empty files: to lay one out and draw it twice takes a second. Their numbers are written as ever."""
    with pytest.MonkeyPatch.context() as patch:
        figure = importlib.import_module("matplotlib.figure").Figure
        patch.setattr(figure, "draw_without_rendering", lambda _: None)
        patch.setattr(figure, "savefig", lambda _, file, **__: open(file, "w").close())
        yield


@pytest.fixture
def choosing():
    """The module that chooses configs, which remembers no choices of before, nor those of a test that changes it."""
    module = importlib.import_module("auxhead.kernels.launch.choose_config")
    module._tuned_or_by_rule.cache_clear()
    yield module
    module._tuned_or_by_rule.cache_clear()


@pytest.fixture
def tiles_from_7(choosing, monkeypatch):
    """Multiply by groups wherever there are 7 samples: batches for which that pays are large to interpret."""
    monkeypatch.setattr(
        "auxhead.kernels.launch.launch_rule._tiling_pays", lambda shape: shape.samples >= 7 and shape.element_size == 2
    )


@pytest.fixture
def by_library(choosing, monkeypatch):
    """A library multiplies every head of which no table knows."""
    monkeypatch.setattr(choosing, "library_pays", lambda *_, **__: True)


@pytest.fixture
def packs_features(choosing, monkeypatch):
    """A launch of its own packs the features of every head of which no table knows."""
    reading = importlib.import_module("auxhead.kernels.launch.launch_rule").config_of_reading
    for name in ("config_by_rule", "config_of_norm"):
        monkeypatch.setattr(choosing, name, lambda shape: reading(shape, "packed"))
    monkeypatch.setattr(choosing, "library_pays", lambda *_, **__: False)


@pytest.fixture(params=["by_library", "packs_features"])
def not_by_one_launch(request):
    """Before the launch that decides a library multiplies, or another launch packs features; what runners say of it."""
    request.getfixturevalue(request.param)
    return {
        "by_library": "A library multiplies heads of ",
        "packs_features": "A launch before pools, or puts in order, the features of heads of ",
    }[request.param]


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """The folder of tuned tables: an empty one instead of the package's."""
    tuned_table = importlib.import_module("auxhead.kernels.launch.tuned_table")
    choosing = importlib.import_module("auxhead.kernels.launch.choose_config")
    folder = tmp_path / "tuned"
    folder.mkdir()
    remembered = (tuned_table.table_of, choosing._tuned_or_by_rule, choosing._warn)
    monkeypatch.setattr(tuned_table, "FOLDER", folder)
    for one in remembered:
        one.cache_clear()
    yield folder
    for one in remembered:
        one.cache_clear()


@pytest.fixture
def users_folder(tmp_path, monkeypatch):
    """The current folder, which is nowhere in sys.path; modules that are imported from it are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:  # by where they lie: a file of results may have the name of a library
        lies = (getattr(sys.modules[name], where, "") for where in ("__file__", "__path__"))
        if any(str(tmp_path) in str(one) for one in lies):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


_caches = itertools.count()


@pytest.fixture(autouse=True)
def no_plans_remembered(monkeypatch, tmp_path_factory):
    """Keep plans in a folder for each test, which is made if any are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"caches-{next(_caches)}"))


@pytest.fixture(autouse=True)
def nothing_compiled_beside(monkeypatch, request):
    """On a GPU "auto" would begin processes that compile in every test that makes a runner."""
    if request.node.get_closest_marker("gpu"):
        monkeypatch.setattr("auxhead.model.auto.candidates.workers_for", lambda _device: 0)


@pytest.fixture
def poisoned_empty(monkeypatch):
    """Fill what torch.empty and its kin return with NaN, huge integers and True, so that an unwritten output shows."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def poisoned(*args, _original=original, **kwargs):
            return _poison(_original(*args, **kwargs))

        monkeypatch.setattr(owner, name, poisoned)


def _poison(tensor):
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


@pytest.fixture
def stops_at_every_tap(monkeypatch):
    """Cut and gate networks that are too small for it to pay."""
    monkeypatch.setattr("auxhead.model.runners.polled._LEAST_SEGMENT_US", 0.0)
    monkeypatch.setattr("auxhead.model.runners.gated._LEAST_GATED_US", 0.0)


@pytest.fixture
def every_move_pays(monkeypatch):
    """Let times be proportional to the batch, so that samples are gathered wherever they can."""
    from auxhead.model.runners.graph_runner import GraphRunner

    monkeypatch.setattr(GraphRunner, "_segment_times", lambda runner, x: [1000.0 * len(x)] * (len(runner._heads) + 1))


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def repeatable():
    """Algorithms of cuDNN that give the same bits again; nothing runs on when the test ends."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield
    torch.cuda.synchronize()


@pytest.fixture(params=["overlapped", "polled", "gated"])
def way(request):
    """Each runner of graphs in turn, by its key in graph_runner_cases.WAYS."""
    return request.param
