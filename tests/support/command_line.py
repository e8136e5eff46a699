"""Runs the three commands as users type them, and checks how each refuses."""

from auxhead.autotune.__main__ import app as autotune_app
from auxhead.model.__main__ import app as model_app
from auxhead.plots.__main__ import app as plots_app
from typer.testing import CliRunner

#: Wide enough for every table and path.
WIDE = {"COLUMNS": "240"}


def auxhead(*arguments):
    return CliRunner(env=WIDE).invoke(model_app, [str(one) for one in arguments])


def tune(*arguments):
    return CliRunner().invoke(autotune_app, [str(one) for one in arguments])


def plot(*arguments):
    return CliRunner().invoke(plots_app, [str(one) for one in arguments])


def assert_one_line_error(result, message):
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and message in result.stderr and result.stderr.count("\n") == 1, (
        result.stderr
    )


def assert_told_how_to_go_on(result):
    """Of a command that records, when it is interrupted: status 130, as shells have it."""
    assert result.exit_code == 130, result.output
    assert result.stderr == "Interrupted; what was measured is recorded: the same command goes on.\n", result.stderr
