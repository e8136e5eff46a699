"""Configuration of the site: pages are the repository's Markdown files, from its top; see ``make docs``."""

import zlib
from pathlib import Path

import auxhead
import typer.main
from auxhead.autotune.__main__ import app as tune
from auxhead.model.__main__ import app as main
from auxhead.plots.__main__ import app as plot
from click import Context
from sphinx.application import Sphinx
from typer.cli import get_docs_for_click

HERE = Path(__file__).parent

project = "auxhead"
author = copyright = "The auxhead authors"
version = release = auxhead.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "README.md",
    "CHANGELOG.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "kernels/**.md",
    "model/README.md",
    "autotune/README.md",
    "autotune/records/**.md",
    "plots/**.md",
]
exclude_patterns = ["docs/_*"]

# Markdown: anchors of headings as GitHub has them; notebooks keep the outputs that they have.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"
smartquotes = False  # options of commands begin with two hyphens
suppress_warnings = ["toc.no_title"]  # a table of winners, which a command writes

# Docstrings: Google's style, types in the signature, members in the order of the source.
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "special-members": "__init__, __call__", "show-inheritance": True}
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"auxhead {release}"
html_static_path = ["_static"]
html_extra_path = ["_top"]
html_css_files = ["site.css"]
html_show_sourcelink = False
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}

#: Pages of others' names that docstrings use; written down here, so that the site is built where there is no network.
_OTHERS = {
    "torch": {
        "torch.Tensor": "tensors.html#torch.Tensor",
        "torch.device": "tensor_attributes.html#torch.device",
        "torch.dtype": "tensor_attributes.html#torch.dtype",
        "torch.memory_format": "tensor_attributes.html#torch.memory_format",
        "torch.nn.Module": "generated/torch.nn.Module.html#torch.nn.Module",
        "torch.nn.Parameter": "generated/torch.nn.parameter.Parameter.html#torch.nn.parameter.Parameter",
        "torch.cuda.Stream": "generated/torch.cuda.Stream_class.html#torch.cuda.Stream",
        "torch.cuda.Event": "generated/torch.cuda.Event.html#torch.cuda.Event",
        "torch.optim.Optimizer": "optim.html#torch.optim.Optimizer",
        "torch.utils.data.DataLoader": "data.html#torch.utils.data.DataLoader",
    },
    "python": {
        "str": "library/stdtypes.html#str",
        "int": "library/functions.html#int",
        "float": "library/functions.html#float",
        "bool": "library/functions.html#bool",
        "dict": "library/stdtypes.html#dict",
        "list": "library/stdtypes.html#list",
        "tuple": "library/stdtypes.html#tuple",
        "pathlib.Path": "library/pathlib.html#pathlib.Path",
        "collections.abc.Sequence": "library/collections.abc.html#collections.abc.Sequence",
        "collections.abc.Mapping": "library/collections.abc.html#collections.abc.Mapping",
        "collections.abc.Callable": "library/collections.abc.html#collections.abc.Callable",
        "collections.abc.Iterable": "library/collections.abc.html#collections.abc.Iterable",
        "ValueError": "library/exceptions.html#ValueError",
        "TypeError": "library/exceptions.html#TypeError",
        "RuntimeError": "library/exceptions.html#RuntimeError",
    },
}


def _inventory(name: str) -> str:
    """Write the names of one of ``_OTHERS`` as an inventory that intersphinx reads; returns its path."""
    path = HERE / "_build" / f"{name}.inv"
    path.parent.mkdir(exist_ok=True)
    lines = "".join(f"{each} py:class 1 {place} -\n" for each, place in _OTHERS[name].items())
    heading = (
        f"# Sphinx inventory version 2\n# Project: {name}\n# Version:\n# The remainder is compressed using zlib.\n"
    )
    path.write_bytes(heading.encode() + zlib.compress(lines.encode()))
    return str(path)


intersphinx_mapping = {
    "torch": ("https://docs.pytorch.org/docs/stable", _inventory("torch")),
    "python": ("https://docs.python.org/3", _inventory("python")),
}


def _write_commands(_app: Sphinx) -> None:
    """Write the page of all commands and their options, by what they say of themselves."""
    pages = ["# Commands\n\nAs `--help` shows them.\n"]
    for name, app in {"auxhead": main, "auxhead-tune": tune, "auxhead-plot": plot}.items():
        command = typer.main.get_command(app)
        said = get_docs_for_click(obj=command, ctx=Context(command, info_name=name), name=name)
        pages.append("\n".join(f"#{line}" if line.startswith("#") else line for line in said.splitlines()))
    (HERE / "reference" / "commands.md").write_text("\n".join(pages))


def _keep_colons(_app: Sphinx, what: str, _name: str, _of: object, _options: object, lines: list[str]) -> None:
    """Keep napoleon from reading what stands before a colon in an attribute's docstring as its type."""
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # a comment


def _skip_made_init(_app: Sphinx, _what: str, name: str, member: object, _skip: bool, _options: object) -> bool | None:
    """Leave out an ``__init__`` that ``dataclass`` has made, which says no more than the class's own signature."""
    return True if name == "__init__" and not member.__doc__ else None


def setup(app: Sphinx) -> None:
    """Write what is written anew for each build, and read docstrings as they are meant."""
    app.connect("autodoc-skip-member", _skip_made_init)
    app.connect("builder-inited", _write_commands)
    app.connect("autodoc-process-docstring", _keep_colons, priority=400)  # before napoleon
