"""The import table of DESIGN.md, checked against the sources."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "model", "autotune", "plots")
MAY_IMPORT = {"kernels": set(), "model": {"kernels"}, "autotune": {"kernels", "model"}, "plots": {"autotune"}}
STANDARD = set(sys.stdlib_module_names)
#: Packages of others; model's are those of its command and of its demo.
OTHERS = {"kernels": {"torch", "triton", "cuda"}, "plots": {"matplotlib", "numpy", "rich", "typer"}}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, at any depth of its code; relative ones resolved from the top folders."""
    package = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                above = package[: len(package) - (node.level - 1)]
                prefix = ".".join(("auxhead", *above, *([node.module] if node.module else [])))
                yield from (f"{prefix}.{alias.name}" for alias in node.names)
            else:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module" and node.args:
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def siblings(path: Path) -> set[str]:
    """Which of the four packages a file imports."""
    parts = (name.split(".") for name in imported(path))
    return {part[1] for part in parts if part[0] == "auxhead" and len(part) > 1}


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_the_design_allows(package: str) -> None:
    for path in sources(package):
        if path.name == "__main__.py":  # an entry point puts the parts together
            continue
        wrong = siblings(path) - MAY_IMPORT[package] - {package}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


@pytest.mark.parametrize("package", OTHERS)
def test_packages_of_others(package: str) -> None:
    for path in sources(package):
        top = {name.split(".")[0] for name in imported(path)} - {"auxhead"} - STANDARD
        wrong = top - OTHERS[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_nobody_imports_an_entry_point() -> None:
    for path in (path for package in PACKAGES for path in sources(package)):
        assert not [name for name in imported(path) if "__main__" in name.split(".")], path


def test_nothing_imports_the_folders_by_their_bare_names() -> None:
    files = [path for folder in (*PACKAGES, "tests") for path in sources(folder)] + sorted(ROOT.glob("*.py"))
    for path in files:
        bare = {name for name in imported(path) if name.split(".")[0] in PACKAGES}
        assert not bare, f"{path.relative_to(ROOT)} imports {sorted(bare)}"


def test_the_packages_import_each_other_relatively() -> None:
    for path in (path for package in PACKAGES for path in sources(package)):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[0] == "auxhead"], path


def test_auxhead_is_a_namespace_of_four_typed_packages() -> None:
    assert not (ROOT / "__init__.py").exists() and not (ROOT / "auxhead").exists()
    for package in PACKAGES:
        assert (ROOT / package / "__init__.py").is_file(), package
        assert (ROOT / package / "py.typed").is_file(), package


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd="/")


@pytest.mark.parametrize("package", ["kernels", "model"])
def test_importing_has_no_side_effects(package: str) -> None:
    code = f"""
import os, threading, torch
state, environment, threads = torch.get_rng_state(), dict(os.environ), threading.active_count()
default, grad, handlers = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
import auxhead.{package}
assert not torch.cuda.is_initialized()
assert torch.equal(state, torch.get_rng_state()) and dict(os.environ) == environment
assert threading.active_count() == threads and torch.get_num_threads() == handlers
assert torch.get_default_dtype() == default and torch.is_grad_enabled() == grad
"""
    done = run(code)
    assert done.returncode == 0 and not done.stdout and not done.stderr, done.stdout + done.stderr


def test_importing_plots_needs_no_torch() -> None:
    done = run("import sys, auxhead.plots; assert 'torch' not in sys.modules and 'triton' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_importing_kernels_and_running_the_reference_without_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from auxhead.kernels import fused_head, runs_triton
x = torch.randn(2, 3, 4, 4)
assert not runs_triton(x) and fused_head(x, torch.randn(5, 3)).probs.shape == (2, 5)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
