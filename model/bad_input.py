"""What the user can put right: bad options, files and folders."""


class BadInput(ValueError):
    """Names the option or file, what it got and what it wants, in one line; commands print it without a traceback."""
