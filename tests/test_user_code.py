"""No file that is read runs code: nothing unpickles or evaluates; commands that run the user's own code say so."""

import ast
import importlib
import pickle
import re
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import typer
from auxhead.autotune.records.record import BadRecord, read_records
from auxhead.model import load_checkpoint, save_checkpoint
from auxhead.model.auto.plan import PlanFile
from auxhead.model.basics.bad_input import BadInput
from auxhead.model.basics.images import open_image
from auxhead.model.commands.options import RUNS_YOUR_CODE
from auxhead.model.training.sources import load_source
from support.checkpoint_files import weights_of
from support.command_line import assert_one_line_error, auxhead
from support.example_models import SmallNet
from support.pictures import write_cifar10, write_image_folder
from support.planner_fakes import small_network
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "model", "autotune", "plots")
#: Modules that make objects, code or processes of what a file holds.
UNSAFE_MODULES = {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "runpy", "code",
    "ctypes", "cffi", "dbm", "h5py", "torch.package", "torch.hub", "torch.utils.cpp_extension", "subprocess",
    "importlib", "os.system",
}  # fmt: skip
UNSAFE_FUNCTIONS = {"eval", "exec", "compile", "__import__"}
#: Whoever they belong to, but for ``json.load``, which reads values alone, and ``tl.load``, which reads memory.
UNSAFE_METHODS = {
    "load", "loads", "system", "popen", "spawnv", "execv", "load_module", "import_module", "load_state_dict_from_url",
    "load_url", "urlopen", "urlretrieve", "fromfile", "memmap",
}  # fmt: skip
#: What is there on purpose, by file.
ALLOWED = {
    "model/__init__.py": {"importlib", "import_module"},  # its own names, when they are used
    "model/runners/table.py": {"importlib", "import_module"},  # its own runners, when one is asked for
    "model/commands/user_model.py": {"importlib", "import_module"},  # the user's function, named on the command line
    "model/listening/recorder.py": {"pickle"},  # dumps alone: random numbers of before and after are compared
    "model/trunk/inductor.py": {"loads"},  # graphs that became bytes a moment ago, in this process
    "model/trunk/compile_workers.py": {"pickle", "loads", "subprocess"},  # graphs in a folder of its own; ourselves
    "model/commands/train_network.py": {"load", "weights_only"},  # a file named on the command line; a test tries one
    "model/processes/dealing.py": {"load"},  # of safetensors, which holds tensors alone
    "model/export/file_formats.py": {"load"},  # a file that was written a moment ago, in a folder of its own
    "plots/figures/registry.py": {"importlib", "import_module"},  # its own figures, when they are drawn
    "model/basics/whose_code.py": {"importlib"},  # find_spec: where a package lies
    "autotune/doctor/watching/loads.py": {"ctypes"},  # CUPTI, which comes with PyTorch
    "autotune/doctor/script.py": {"runpy"},  # the user's script, named on the command line
    "kernels/cuda/lifetimes.py": {"ctypes"},  # Py_IncRef, of objects of its own
    "model/basics/machine.py": {"subprocess"},  # nvidia-smi and git, of fixed arguments
}


def unsafe(source: str) -> set[str]:
    """Names of modules imported and functions called in a source that may run what a file holds."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call):
            function, method = getattr(node.func, "id", ""), getattr(node.func, "attr", "")
            owner = getattr(getattr(node.func, "value", None), "id", "")
            of_others = method if owner not in ("json", "tl", "platform") else ""
            if function in UNSAFE_FUNCTIONS | UNSAFE_METHODS or of_others in UNSAFE_METHODS:
                found.add(function or method)
            found |= {word.arg for word in node.keywords if word.arg in ("allow_pickle", "weights_only")}
            found |= {"shell" for word in node.keywords if word.arg == "shell"}
            continue
        else:
            continue
        for name in names:
            for module in UNSAFE_MODULES:
                if f"{name}.".startswith(f"{module}.") and not name.startswith("importlib.metadata"):
                    found.add(module)
    return found


def test_no_source_unpickles_or_evaluates_and_what_is_looked_for_is_found():
    for path in [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]:
        name = path.relative_to(ROOT).as_posix()
        surplus = unsafe(path.read_text()) - ALLOWED.get(name, set())
        assert not surplus, f"{name}: {', '.join(sorted(surplus))}"
    for source in (
        "import pickle", "from joblib import load", "import torch\ntorch.load('x')", "import yaml", "eval('x')",
        "torch.load('x', weights_only=True)", "import numpy\nnumpy.load('x', allow_pickle=True)", "exec(text)",
        "__import__('x')", "import os\nos.system('x')", "from subprocess import run", "pickle.loads(x)",
        "from importlib import import_module", "import torch.hub",
    ):  # fmt: skip
        assert unsafe(source), source


class Told:
    """Pickled, it leaves a file behind when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_no_pickle_in_the_place_of_a_file_is_opened(tmp_path):
    mark = tmp_path / "mark"
    content = pickle.dumps(Told(mark))
    pickle.loads(content)
    assert mark.exists(), "it works"
    mark.unlink()
    save_checkpoint(tmp_path / "net", small_network())
    for path in (weights_of(tmp_path / "net"), tmp_path / "net" / "model.json"):
        path.write_bytes(content)
        with pytest.raises(BadInput):
            load_checkpoint(tmp_path / "net", SmallNet())
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(BadInput):
        open_image(tmp_path / "file")
    with pytest.warns(UserWarning, match="holds no plan"):
        PlanFile(tmp_path / "file", {}).read()
    (tmp_path / "file").write_bytes(content + b"\n")
    with pytest.raises(BadRecord):
        read_records(tmp_path / "file")
    for file in (write_cifar10(tmp_path) / "cifar-10-batches-py").iterdir():
        file.write_bytes(content)
    with pytest.raises(BadInput, match="cifar-10-batches-py is not CIFAR-10"):
        load_source(tmp_path)
    (tmp_path / "weights.pth").write_bytes(content)
    write_image_folder(tmp_path / "pictures", per_class=3)
    train = "train", "--data", tmp_path / "pictures", "--backbone", "resnet18", "--weights", tmp_path / "weights.pth"
    assert_one_line_error(auxhead(*train, "--device", "cpu"), "weights.pth cannot be read as parameters")
    assert not mark.exists()


def commands():
    """Each command with its app, name, and parameters: their names, and whether they are text, which may name code."""
    for package in ("model", "autotune", "plots"):
        app = importlib.import_module(f"auxhead.{package}.__main__").app
        found = typer.main.get_command(app).commands
        for (name, command), registered in zip(found.items(), app.registered_commands, strict=True):
            hints = get_type_hints(registered.callback)
            texts = {one for one, hint in hints.items() if hint in (str, str | None, list[str], list[str] | None)}
            yield pytest.param(app, name, command, texts, id=f"{package}-{name}")


def is_option(parameter):
    return parameter.param_type_name == "option"


def says_so(parameter):
    return RUNS_YOUR_CODE in (getattr(parameter, "help", None) or "")


@pytest.fixture
def probe(users_folder):
    """What a module in the current directory, which is a checkpoint as well, leaves behind when it is imported."""
    save_checkpoint(users_folder, small_network())
    (users_folder / "probe.py").write_text(
        "from pathlib import Path\nPath('imported').touch()\n\n\ndef make():\n    return 1\n"
    )
    return users_folder / "imported"


@pytest.mark.parametrize(("app", "name", "command", "texts"), list(commands()))
def test_the_help_says_where_the_users_code_is_run(app, name, command, texts, probe):
    """Each option and argument in turn names a function; where that is imported the help says so, and nowhere else."""
    required = [
        text for one in command.params if one.required and is_option(one) for text in (one.opts[0], str(probe.parent))
    ]
    for one in command.params:
        if one.name not in texts:
            assert not says_so(one)
            continue
        probe.unlink(missing_ok=True)
        sys.modules.pop("probe", None)
        arguments = [other for other in command.params if other.required and not is_option(other)]
        others = [str(probe.parent) for other in arguments if other is not one]
        if name == "profile" and one.name in ("backbone", "modules"):  # which belong to a checkpoint
            others.append(str(probe.parent))
        CliRunner().invoke(app, [name, *required, *([one.opts[0]] if is_option(one) else []), "probe:make", *others])
        assert probe.exists() == says_so(one), f"{name} {one.name}: runs the user's code: {probe.exists()}"
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", CliRunner().invoke(app, [name, "--help"]).output).split())
    assert ("This runs your code" in shown) == any(map(says_so, command.params))


def test_some_commands_run_the_users_code():
    found = {one.id for one in commands() if any(map(says_so, one.values[2].params))}
    assert {"model-infer", "autotune-bench", "autotune-plan", "autotune-profile", "autotune-overlap"} <= found, found
