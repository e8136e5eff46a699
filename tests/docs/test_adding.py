"""The worked examples of the guide on adding: each patch fits the code, and the tests that it names pass with it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutants.repository_copy import copy_of_repository
from support.documents import ROOT

GUIDE = (ROOT / "docs" / "guides" / "adding.md").read_text()
PATCHES = ROOT / "docs" / "guides" / "adding"
#: Files of which most tests take seconds and see nothing of a patch, and what is run of them; of all others everything.
FEW = {
    "test_criteria.py": "purity",
    "test_slices.py": "purity",
    "test_shipped_tables.py": "kernel_here",
    "test_figures.py": "gallery_lists or lead_somewhere",
    "test_fuse_aux_heads.py": "left_alone",
    "test_make_runner.py": "bad_arguments or graphs_need",
    "test_bad_input.py": "no_batch",
}
#: Compiles everything anew, which ``make test`` does for the code as it is.
NOT_RUN = "test_machine_code.py"
#: By the name of the patch, the section of the guide.
SECTIONS = {
    re.findall(r"^    git apply docs/guides/adding/(\w+)\.diff$", section, flags=re.MULTILINE)[0]: section
    for section in re.split(r"^## ", GUIDE, flags=re.MULTILINE)
    if "    git apply " in section
}


def test_every_patch_has_its_section():
    assert {f"{name}.diff" for name in SECTIONS} == {path.name for path in PATCHES.iterdir()}
    for name, section in SECTIONS.items():
        assert f"    git apply -R docs/guides/adding/{name}.diff\n" in section


@pytest.mark.parametrize("name", SECTIONS)
def test_what_is_shown_stands_in_the_patch(name):
    patch = (PATCHES / f"{name}.diff").read_text()
    shown = re.findall(r"^```diff\n(.*?)^```$", SECTIONS[name], flags=re.DOTALL | re.MULTILINE)
    assert shown and all(one in patch for one in shown)
    changed = set(re.findall(r"^\+\+\+ b/(.+)$", patch, flags=re.MULTILINE))
    named = set(re.findall(r"`([\w/]+\.\w+)`", SECTIONS[name]))
    assert changed <= named, f"the guide does not name {changed - named}"
    assert all((ROOT / path).is_file() or path in changed for path in named if "/" in path)


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="copies what git knows")
def test_the_examples_work(tmp_path):
    """All at once, so that PyTorch is imported once: no patch touches what another does."""
    copy_of_repository(tmp_path)
    (tmp_path / "build" / "auxhead" / "pyproject.toml").symlink_to(tmp_path / "pyproject.toml")  # a test reads it there
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "build"), "CUDA_VISIBLE_DEVICES": ""}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    tests: list[str] = []
    reverted: list[list[str]] = []
    for section in SECTIONS.values():
        for command in re.findall(r"^    ((?:git apply|\.venv/bin/).+)$", section, flags=re.MULTILINE):
            program, *words = shlex.split(command)
            if "pytest" in words:
                tests += [word for word in words if word.endswith(".py") and not word.endswith(NOT_RUN)]
            elif "-R" in words:
                reverted.append([program, *words])
            elif program == "git":
                run(program, *words)
            else:
                of_plots = ["-m", "auxhead.plots"] if program.endswith("auxhead-plot") else []
                printed = run(sys.executable, *of_plots, *words)
                if "kernel_hash())" in command:  # the guide has its reader put that into the file
                    file = tmp_path / "kernels" / "launch" / "kernel_hash.py"
                    changed = re.sub(r'(SAME_MACHINE_CODE = \{\s*)"\w+"', rf'\1"{printed.strip()}"', file.read_text())
                    assert changed != file.read_text()
                    file.write_text(changed)
    files = " or ".join(Path(file).stem for file in FEW)
    chosen = f"{' or '.join(FEW.values())} or not ({files})"
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *tests)
    for words in reversed(reverted):
        run(*words)
    for name in SECTIONS:
        for patched in re.findall(r"^\+\+\+ b/(.+)$", (PATCHES / f"{name}.diff").read_text(), flags=re.MULTILINE):
            was, there = ROOT / patched, tmp_path / patched
            assert there.exists() == was.exists() and (not was.exists() or there.read_text() == was.read_text())
