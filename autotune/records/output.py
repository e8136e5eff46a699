"""Output of commands as model's have it, for packages that may import no more than records; none of it needs torch."""

from ...model.commands.console import plain_console
from ...model.commands.errors import one_line_errors
from ...model.replacing import is_standard_output, replacing, writing

__all__ = ["is_standard_output", "one_line_errors", "plain_console", "replacing", "writing"]
