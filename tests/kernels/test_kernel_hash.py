"""kernel_hash.py: the hash changes with code alone, not with comments and docstrings."""

import functools
import importlib
import re

import pytest
from auxhead.kernels.launch.constants import LaunchConstants
from auxhead.kernels.launch.kernel_hash import FOLDER, _code, kernel_hash


def test_kernel_hash_changes_with_code_alone(tmp_path, monkeypatch):
    module = importlib.import_module("auxhead.kernels.launch.kernel_hash")
    sources = {path.name: path.read_text() for path in FOLDER.glob("*.py")}
    assert re.fullmatch("[0-9a-f]{16}", kernel_hash())
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(module, "_code", functools.cache(_code))  # of sources that stay: once

    def hash_of(changed):
        for name, source in {**sources, **changed}.items():
            (tmp_path / name).write_text(source)
        return kernel_hash.__wrapped__()

    assert hash_of({}) == kernel_hash()
    (tmp_path / "launch").mkdir()
    constants, other = module.CONSTANTS[0].read_text(), tmp_path / "launch" / "constants.py"
    monkeypatch.setattr(module, "CONSTANTS", (other, *module.CONSTANTS[1:]))
    other.write_text(constants)
    assert hash_of({}) == kernel_hash()
    other.write_text(constants + "\nx = 1\n")
    assert hash_of({}) != kernel_hash()
    other.write_text(constants)
    for name, source in sources.items():
        assert hash_of({name: source + "\n\n# why\n"}) == kernel_hash(), name
        assert hash_of({name: source + "\nx = 1\n"}) != kernel_hash(), name


def test_triton_finds_no_kernel_whose_constants_were_computed_otherwise():
    """Its key has a launch's constants as text: their fields, and no property."""
    assert kernel_hash() in str(LaunchConstants((), classes=2, bounded=False))


SAME_CODE = {
    "comments and blank lines": ("a = 1\n\n\n# why\nb = 2  # what\n", "a = 1\nb = 2\n"),
    "docstrings": ('"""One\nor two."""\ndef f():\n    """Three."""\n    return 1\n', "def f():\n    return 1\n"),
    "imports": ("from a import b\nimport c as d\n\ne = b(d)\n", "from f import (\n    b,\n)\n\ne = b(d)\n"),
    "a comment inside a call": ("f(\n    1,  # one\n)\n", "f(\n    1,\n)\n"),
}
OTHER_CODE = {
    "a string that is a value": ('a = "# no comment"\n', 'a = ""\n'),
    "the end of a block": ("if a:\n    b\n    c\n", "if a:\n    b\nc\n"),
    "a part of a name": ("a b\n", "ab\n"),
    "an f-string": ('a = f"{b + 1}"\n', 'a = f"{b + 2}"\n'),
}


@pytest.mark.parametrize("one, two", SAME_CODE.values(), ids=SAME_CODE)
def test_same_code(one, two):
    assert _code(one) == _code(two)


@pytest.mark.parametrize("one, two", OTHER_CODE.values(), ids=OTHER_CODE)
def test_other_code(one, two):
    assert _code(one) != _code(two)
