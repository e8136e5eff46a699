"""Names of ``auxhead.model``, those of ``auxhead``: loaded when used, the same to users and type checkers."""

import ast
import importlib
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import resolve_name
from pathlib import Path

import auxhead
import auxhead.model
import pytest
import torch
from auxhead.model import _MODULES, FusedAuxHead

STUB = Path(auxhead.model.__file__).with_suffix(".pyi")


def test_type_checkers_are_told_the_same_names() -> None:
    tree = ast.parse(STUB.read_text())
    told = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.name == alias.asname, "a stub hands on what it renames"
                told[alias.name] = "." * node.level + (node.module or "")
    assert told == _MODULES and list(_MODULES) == sorted(_MODULES)
    (declared,) = (node.target.id for node in tree.body if isinstance(node, ast.AnnAssign))
    assert declared == "__version__"


def test_names_are_those_of_their_modules() -> None:
    for name, place in _MODULES.items():
        module = importlib.import_module(resolve_name(place, "auxhead.model"))
        assert getattr(auxhead.model, name) is getattr(module, name) and name in dir(auxhead.model)


def test_everything_at_once() -> None:
    names: dict[str, object] = {}
    exec("from auxhead.model import *", names)
    assert set(_MODULES) <= set(names) and names["make_runner"] is auxhead.model.make_runner
    assert auxhead.model.__version__ == version("auxhead") and "__version__" in dir(auxhead.model)
    with pytest.raises(AttributeError, match="module 'auxhead.model' has no attribute 'nosuch'"):
        auxhead.model.nosuch  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nosuch'"):
        exec("from auxhead.model import nosuch")


def test_short_names() -> None:
    assert all(getattr(auxhead, name) is getattr(auxhead.model, name) for name in _MODULES)
    assert {*_MODULES, "__version__"} <= {*dir(auxhead)} and auxhead.__version__ == auxhead.model.__version__
    names: dict[str, object] = {}
    exec("from auxhead import *", names)
    assert names["attach"] is auxhead.model.attach and "import_module" not in names
    with pytest.raises(AttributeError, match="module 'auxhead' has no attribute 'nosuch'"):
        auxhead.nosuch  # noqa: B018


def test_the_folders_of_the_repository_are_no_packages_of_their_own(tmp_path: Path) -> None:
    code = "import sys, auxhead; dir(auxhead); auxhead.model; assert 'torch' not in sys.modules; import kernels"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "No module named 'kernels'" in ended.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_what_is_loaded_first(tmp_path: Path) -> None:
    """Nothing before it is used, an exported head with the kernels alone, and no module in place of its function.

    The latter in a process each, since what was imported stays, but for others' packages.
    """
    torch.export.save(torch.export.export(FusedAuxHead(6, 5).eval(), (torch.randn(3, 6, 4, 4),)), tmp_path / "head.pt2")
    named_alike = [name for name in _MODULES if _MODULES[name] == f".{name}"]
    assert len(named_alike) > 1
    code = f"""
import os, sys, auxhead.model
auxhead.model.__version__; dir(auxhead.model)
assert 'torch' not in sys.modules
import torch, auxhead.kernels
out = torch.export.load(sys.argv[1]).module()(torch.randn(3, 6, 4, 4))
assert type(out) is auxhead.kernels.HeadOutput and out.probs.shape == (3, 5)
assert 'auxhead.model.answers.exit_rule' not in sys.modules
import torch._dynamo, torchvision
for name in {named_alike}:
    of_module = f"auxhead.model.{{name}}"
    for first in (f"from {{of_module}} import {{name}}", "import auxhead.model"):
        if (child := os.fork()) == 0:
            try:
                exec(first)
                exec(f"import auxhead.model as m; assert m.{{name}}.__name__ == name and callable(m.{{name}})")
                exec(f"from auxhead.model import {{name}} as f; import auxhead.model.{{name}} as g; assert f is g")
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0, (name, first)
auxhead.model.ExitRule
"""
    program = [sys.executable, "-c", code, str(tmp_path / "head.pt2")]
    done = subprocess.run(program, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
