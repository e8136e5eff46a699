"""The import table of ARCHITECTURE.md, checked against the sources."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest
from auxhead.model import _MODULES

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "model", "autotune", "plots")
#: Packages, or rooms of them, that each may import beside itself; figures import what needs no torch.
MAY_IMPORT = {
    "kernels": set(),
    "model": {"kernels"},
    "autotune": {"kernels", "model"},
    "plots": {"autotune.records", "model.basics", "model.commands"},
}
#: By package, its rooms from the lowest level to the highest, as ARCHITECTURE.md has them.
LEVELS = {
    package: [set(rooms.replace(" ", "").split(",")) for rooms in " ".join(line.split()).split(" <- ")]
    for package, line in re.findall(
        r"^    (\w+): (.+(?:\n {8}.+)*)", (ROOT / "ARCHITECTURE.md").read_text(), flags=re.MULTILINE
    )
}
LEVELS["model"].insert(-1, {"__init__"})  # the public names, which examples and guides import
STANDARD = set(sys.stdlib_module_names)
#: Packages of others; model's are those of its command and of its demo.
OTHERS = {"kernels": {"torch", "triton", "cuda"}, "plots": {"matplotlib", "numpy", "rich", "typer"}}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def all_sources() -> list[Path]:
    return [path for package in PACKAGES for path in sources(package)]


def entry_points() -> list[Path]:
    return [path for path in all_sources() if path.name == "__main__.py"]


def importing() -> list[Path]:
    """The files that the import table is about: all but entry points, which wire, and model's list of public names."""
    return [path for path in all_sources() if path.name != "__main__.py" and path != ROOT / "model" / "__init__.py"]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def imported(path: Path) -> list[str]:
    """Dotted names that a file imports, at any depth of its code; relative ones resolved from the top folders."""
    return list(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    package = path.relative_to(ROOT).parts[:-1]
    if path == ROOT / "model" / "__init__.py":  # loads names when they are used
        yield from (resolve_name(f"{module}.{name}", "auxhead.model") for name, module in _MODULES.items())
    for node in ast.walk(parsed(path)):
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


@cache
def file_of(name: str) -> Path | None:
    """The source file behind a dotted name of ours: a module, a package, or a symbol of one of them."""
    parts = name.split(".")
    if parts[0] != "auxhead":
        return None
    for end in (len(parts), len(parts) - 1):
        base = ROOT.joinpath(*parts[1:end])
        if end > 1 and base.with_suffix(".py").is_file():
            return base.with_suffix(".py")
        if end > 1 and (base / "__init__.py").is_file():
            return base / "__init__.py"
    raise AssertionError(f"{name}: no such module")


@cache
def imported_files(path: Path) -> set[Path]:
    return {file for name in imported(path) if (file := file_of(name)) is not None and file != path}


def test_imports_inside_functions_and_names_loaded_later_are_seen() -> None:
    assert ROOT / "autotune" / "sweep" / "run.py" in imported_files(ROOT / "autotune" / "sweep" / "command.py")
    assert ROOT / "model" / "make_runner.py" in imported_files(ROOT / "model" / "__init__.py")
    assert ROOT / "autotune" / "bench" / "demo_latency.py" in imported_files(ROOT / "model" / "__main__.py")


def room_of(path: Path) -> tuple[str, str]:
    """The package of a file, and its folder there; of model the three front doors that stand flat are rooms each."""
    package, *inside = path.relative_to(ROOT).with_suffix("").parts
    return package, inside[0] if len(inside) > 1 or package == "model" else ""


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_the_design_allows(package: str) -> None:
    for path in importing():
        if room_of(path)[0] != package:
            continue
        for file in imported_files(path):
            other, room = room_of(file)
            allowed = other == package or {other, f"{other}.{room}"} & MAY_IMPORT[package]
            assert allowed, f"{path.relative_to(ROOT)} imports {file.relative_to(ROOT)}"


@pytest.mark.parametrize("package", LEVELS)
def test_rooms_import_rooms_of_lower_levels_only(package: str) -> None:
    level = {room: height for height, rooms in enumerate(LEVELS[package]) for room in rooms}
    for path in importing():
        if room_of(path)[0] != package:
            continue
        here = room_of(path)[1]
        for file in imported_files(path):
            other, there = room_of(file)
            if other == package and there != here:
                assert level[there] < level[here], f"{path.relative_to(ROOT)} imports {file.relative_to(ROOT)}"


def test_the_rooms_of_several_devices_know_nothing_of_each_other() -> None:
    """What both need lies above them, and knows neither."""
    above = ROOT / "model" / "parallel"
    for path in sources("model/parallel"):
        for file in imported_files(path):
            if above in file.parents:
                assert file.parent in {path.parent, above}, f"{path.relative_to(ROOT)} imports {file.relative_to(ROOT)}"


def test_no_two_files_import_each_other_directly_or_by_others() -> None:
    graph = {path: imported_files(path) for path in all_sources()}
    done: set[Path] = set()

    def visit(path: Path, way: tuple[Path, ...]) -> None:
        assert path not in way, "a circle: " + " -> ".join(str(one.relative_to(ROOT)) for one in (*way, path))
        if path not in done:
            for file in graph[path]:
                visit(file, (*way, path))
            done.add(path)

    for path in graph:
        visit(path, ())


def test_no_import_is_for_type_checkers_alone() -> None:
    for path in all_sources():
        assert "TYPE_CHECKING" not in path.read_text(), f"{path.relative_to(ROOT)}: is there a circle behind it?"


def test_entry_points_register_and_wire_alone() -> None:
    """What they import from beyond the table is handed on as an argument, never called; there is nothing to decide."""
    for path in entry_points():
        source = path.read_text()
        assert len(source.splitlines()) <= 60, f"{path.relative_to(ROOT)} has more than 60 lines"
        tree = ast.parse(source)
        kinds = (ast.If, ast.While, ast.Try, ast.With, ast.ClassDef)
        decides = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        assert len(decides) == 1, f"{path.relative_to(ROOT)} does more than register, wire and run"
        package = room_of(path)[0]
        beyond = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level > 1:
                beyond |= {
                    alias.asname or alias.name
                    for alias in node.names
                    if (node.module or alias.name).split(".")[0] not in MAY_IMPORT[package]
                }
        called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and hasattr(node.func, "id")}
        assert not beyond & called, f"{path.relative_to(ROOT)} calls {sorted(beyond & called)}"


@pytest.mark.parametrize("package", OTHERS)
def test_packages_of_others(package: str) -> None:
    for path in sources(package):
        top = {name.split(".")[0] for name in imported(path)} - {"auxhead"} - STANDARD
        wrong = top - OTHERS[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_nobody_imports_an_entry_point() -> None:
    for path in all_sources():
        assert not [name for name in imported(path) if "__main__" in name.split(".")], path


def test_nothing_imports_the_folders_by_their_bare_names() -> None:
    files = [path for folder in (*PACKAGES, "tests") for path in sources(folder)] + sorted(ROOT.glob("*.py"))
    for path in files:
        if re.search(rf"\b(import|from) +({'|'.join(PACKAGES)})\b|\bimport_module\b", path.read_text()):
            bare = {name for name in imported(path) if name.split(".")[0] in PACKAGES}
            assert not bare, f"{path.relative_to(ROOT)} imports {sorted(bare)}"


def test_the_packages_import_each_other_relatively() -> None:
    copied = {*sources("model/examples"), *sources("model/guides")}  # by people, into code of their own
    for path in set(all_sources()) - copied:
        for node in ast.walk(parsed(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.split(".")[0] == "auxhead"], path


def test_examples_and_guides_import_public_names_alone() -> None:
    public = {f"auxhead.model.{name}" for name in importlib.import_module("auxhead.model").__all__}
    for path in [*sources("model/examples"), *sources("model/guides")]:
        ours = {name for name in imported(path) if name.split(".")[0] == "auxhead"}
        ours = {name for name in ours if not name.startswith("auxhead.model.guides.")}
        assert ours <= public, f"{path.relative_to(ROOT)} imports {sorted(ours - public)}"


def test_every_folder_says_what_it_is_for() -> None:
    """Every folder with sources has a package docstring; its first line, and that of each module, names the thing."""
    for path in all_sources():
        said = ast.get_docstring(parsed(path)) or ""
        first = said.partition("\n")[0]
        assert first, f"{path.relative_to(ROOT)} has no docstring"
        asks = first.split()[0] in {"What", "Whether", "Which", "How", "Where", "Why"}
        assert not asks, f"{path.relative_to(ROOT)}: {first!r} asks instead of naming the thing"


ASIDE = """
import os, sys, threading, torch
state, environment, threads = torch.get_rng_state(), dict(os.environ), threading.active_count()
default, grad, handlers = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
without_triton = sys.argv[1:]
if without_triton:
    sys.modules["triton"] = None
import auxhead.kernels, auxhead.model
assert not torch.cuda.is_initialized()
assert torch.equal(state, torch.get_rng_state()) and dict(os.environ) == environment
assert threading.active_count() == threads and torch.get_num_threads() == handlers
assert torch.get_default_dtype() == default and torch.is_grad_enabled() == grad
if without_triton:
    x = torch.randn(2, 3, 4, 4)
    assert not auxhead.kernels.runs_triton(x)
    assert auxhead.kernels.fused_head(x, torch.randn(5, 3)).probs.shape == (2, 5)
"""


@pytest.mark.parametrize("without", [(), ("triton",)])
def test_importing_has_no_side_effects_and_works_without_triton(without: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", ASIDE, *without], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("package", PACKAGES)
def test_python_3_10_takes_all_classes(package: str) -> None:
    """Which refuses a ``NamedTuple`` that inherits from anything else, too."""
    for path in sources(package):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and len(node.bases) > 1:
                assert "NamedTuple" not in map(ast.unparse, node.bases), f"{path}:{node.lineno}"
