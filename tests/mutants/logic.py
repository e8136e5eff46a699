"""Mutation run over modules that are cheap to test: ``python tests/mutants/logic.py [MODULE ...]``.

Each change of one operator, number or keyword that Cosmic Ray knows is made in a copy of the repository, and the tests
that ``logic.toml`` names for the module are run, in a fork of this process, which has imported PyTorch once. A change
that no test notices survives; ``logic_equivalent.toml`` lists those that cannot be noticed, with the reason, and they
are not made. The run fails if another one survives, if fewer than 90 % are noticed, those listed included, or if the
list names a change that is no more.
"""

import gc
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

# read when PyTorch, Triton and pytest are imported
os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

import pytest
import toml
import torch
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from repository_copy import ROOT, copy_of_repository

HERE = Path(__file__).resolve().parent
LEAST_KILLED = 0.9
#: Imported before the forks; what else tests import is imported by each of them.
IMPORTED_ONCE = (
    "cuda.bindings.driver", "hypothesis.strategies", "matplotlib.pyplot", "numpy", "safetensors.torch", "torch.fx",
    "torchvision", "triton.runtime.interpreter", "typer.testing",
)  # fmt: skip
#: The mark of positional parameters, which Cosmic Ray takes that of keyword-only ones for a product to make.
KEYWORDS_ALONE = re.compile(r"(^|[(,] ?)/(,|$)")
#: Bytes that a change may make tests ask for.
MOST_MEMORY = 6 << 30


class Mutant(NamedTuple):
    """A change of one module."""

    module: str
    number: int
    """Line of the change, from 1."""
    line: str
    becomes: str
    """The line without the spaces around it, and what it becomes: "" if it goes."""
    code: str
    """The whole module with the change."""

    @property
    def key(self) -> tuple[str, str, str]:
        """The change, wherever the line stands: as the list of equivalent ones names it."""
        return self.module, self.line, self.becomes

    def __str__(self) -> str:
        return f"{self.module}:{self.number}\n    - {self.line}\n    + {self.becomes}"


def mutants(module: str, operators: list[str]) -> Iterator[Mutant]:
    """Yield each change of a module that Python can compile."""
    source = (ROOT / module).read_text()
    seen = {source}
    for name in operators:
        operator, occurrence = get_operator(f"core/{name}")(), 0
        while (code := mutate_code(source, operator, occurrence)) is not None:
            occurrence += 1
            if code not in seen and compiles(code):
                mutant = Mutant(module, *changed_line(source, code), code)
                if not KEYWORDS_ALONE.search(mutant.becomes):
                    yield mutant
            seen.add(code)


def compiles(code: str) -> bool:
    """Return whether Python can compile it."""
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def changed_line(source: str, code: str) -> tuple[int, str, str]:
    """Return number and text of the first line that differs, and what it becomes; blank ones do not count."""
    lines = [[line.strip() for line in one.splitlines()] for one in (source, code)]
    for tag, i, end, j, stop in SequenceMatcher(None, *lines, autojunk=False).get_opcodes():
        old, new = [line for line in lines[0][i:end] if line], [line for line in lines[1][j:stop] if line]
        if tag != "equal" and old != new:
            return i + 1, (old or [""])[0], (new or [""])[0]
    raise ValueError("nothing but white space differs")


def passes(copy: Path, tests: list[str], limit_s: float) -> bool:
    """Run tests in a fork, whose output goes to a file; one that takes longer than the limit has not passed."""
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (MOST_MEMORY, MOST_MEMORY))
            log = os.open(copy / "build" / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(log, 1), os.dup2(log, 2)
            os.chdir(copy)
            torch.set_num_threads(1)
            options = ["-x", "-q", "-p", "no:cacheprovider"]
            os._exit(pytest.main([*options, *tests], plugins=[WithoutShrinking()]))
        finally:
            os._exit(70)  # an error above
    try:
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                child = 0
                return os.waitstatus_to_exitcode(status) == 0
            time.sleep(0.02)
        return False
    finally:
        if child:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)


class WithoutShrinking:
    """Plugin of pytest: hypothesis's first counterexample is enough."""

    def pytest_configure(self) -> None:
        """Run after tests/conftest.py has loaded its profile."""
        from hypothesis import Phase, settings

        settings.register_profile("mutants", settings(), phases=[Phase.explicit, Phase.generate], database=None)
        settings.load_profile("mutants")


def main(chosen: list[str]) -> int:
    """Run all mutants of the modules, or of those chosen; returns the exit status."""
    settings: dict[str, Any] = toml.loads((HERE / "logic.toml").read_text())
    listed = toml.loads((HERE / "logic_equivalent.toml").read_text()).get("equivalent", [])
    equivalent = {(one["module"], one["line"], one["becomes"]) for one in listed}
    modules = {name: tests for name, tests in settings["tests"].items() if not chosen or name in chosen}
    unknown = {*chosen} - {*modules} or {*settings["operators"]} - {
        name.removeprefix("core/") for name in operator_names()
    }
    if unknown:
        raise SystemExit(f"logic.toml: does not know {sorted(unknown)}")
    made: set[tuple[str, str, str]] = set()
    sums = dict.fromkeys(("mutants", "killed", "survived", "equivalent"), 0)
    with tempfile.TemporaryDirectory(prefix="auxhead-mutants-") as folder:
        copy = Path(folder)
        copy_of_repository(copy)
        sys.path.insert(0, str(copy / "build"))
        sys.meta_path[:] = [
            finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")
        ]
        for name in IMPORTED_ONCE:
            __import__(name)
        gc.collect()
        gc.freeze()  # a collection in a fork would write to, and so copy, all that was imported
        for module, tests in modules.items():
            began = time.monotonic()
            if not passes(copy, tests, 600.0):
                print((copy / "build" / "log").read_text())
                raise SystemExit(f"{module}: its tests do not pass without a change")
            limit_s = 10.0 + 5.0 * (time.monotonic() - began)
            found = list(mutants(module, settings["operators"]))
            made |= {one.key for one in found}
            drawn = random.Random(0).sample(found, min(len(found), settings["most"]))
            tried = [one for one in drawn if one.key not in equivalent]
            lived = []
            for one in sorted(tried, key=lambda one: one.number):
                for compiled in (copy / module).parent.glob(f"__pycache__/{Path(module).stem}.*"):
                    compiled.unlink()
                (copy / module).write_text(one.code)
                if passes(copy, tests, limit_s):
                    lived.append(one)
            shutil.copy2(ROOT / module, copy / module)
            took = f"{time.monotonic() - began:.0f} s"
            counts = len(drawn), len(tried) - len(lived), len(lived), len(drawn) - len(tried)
            sums = {name: sums[name] + count for name, count in zip(sums, counts, strict=True)}
            sampled = "" if len(drawn) == len(found) else f" ({len(drawn)} of {len(found)}, drawn with a fixed seed)"
            print(
                f"{module}{sampled}: {in_words(dict(zip(sums, counts, strict=True)))}, {took}",
                *lived, sep="\n  ", flush=True,
            )  # fmt: skip
    stale = [one for one in equivalent if one[0] in modules and one not in made]
    for one in stale:
        print("logic_equivalent.toml: no such change any more:", *one, sep="\n    ")
    share = sums["killed"] / max(sums["mutants"], 1)
    print(f"{in_words(sums)}: {share:.1%} killed, wants {LEAST_KILLED:.0%} and no survivor")
    return int(bool(stale or sums["survived"] or share < LEAST_KILLED))


def in_words(counts: dict[str, int]) -> str:
    """Return counts as "40 mutants, 39 killed"."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the copy goes
    raise SystemExit(main(sys.argv[1:]))
