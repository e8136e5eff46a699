"""``BadInput``: an error that the user can put right, told in one line; ``--help`` has it without PyTorch."""


class BadInput(ValueError):
    """Names the option, file or folder, what it got and what it wants; commands print it without a traceback."""


def one_line(message: object) -> str:
    """Return a message or a name without line breaks, shortened."""
    return f"{' '.join(str(message).split()):.200}"
