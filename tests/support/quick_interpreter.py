"""Speeds up Triton's interpreter five times by leaving out work whose results nothing reads.

Each function here changes what the interpreter of this process does from then on; what it computes stays the same.
"""

import dataclasses
import functools

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def quicken() -> None:
    """Let all that is interpreted from now on take a fifth of the time."""
    _prepare_once_a_launch()
    _drop_unread_checks()
    _remember_dtypes()
    _type_tuples_on_demand()


def _prepare_once_a_launch() -> None:
    """Prepare the language once a launch, not at every call of a function.

    Before each call of a jitted function the interpreter looks through all members of ``triton.language`` and wraps
    what it has not wrapped yet, which after the first call is nothing. Nothing is unwrapped before the launch ends.
    """
    prepare, prepared = interpreter._patch_lang, set()

    def prepare_unless_prepared(function):
        modules = frozenset(id(one) for one in function.__globals__.values() if one is tl or one is tl.core)
        if modules in prepared:
            return interpreter._LangPatchScope()  # of no changes
        scope = prepare(function)
        restore = scope.restore

        def restore_at_the_end():
            prepared.clear()
            restore()

        scope.restore = restore_at_the_end
        prepared.add(modules)
        return scope

    interpreter._patch_lang = prepare_unless_prepared


def _drop_unread_checks() -> None:
    """Do not compute every sum and product of int32 again in int64 for an assertion that is left out."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "it leaves assertions out"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remember_dtypes() -> None:
    """Do not build the table of NumPy's dtypes for every look into it."""
    look_up, known = interpreter._get_np_dtype, {}

    def remembered(dtype):
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = remembered


def _type_tuples_on_demand() -> None:
    """Give a tuple, as every shape is, its type when somebody asks for it, which interpreted nobody does."""

    def init(self, args, type=None):
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    core.tuple.__init__ = init
    core.tuple.type = functools.cached_property(lambda self: core._type_for_tuple_values(self.values))
    core.tuple.type.__set_name__(core.tuple, "type")
