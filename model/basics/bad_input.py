"""``BadInput``: an error that the user can put right, told in one line."""


class BadInput(ValueError):
    """Names the option, file or folder, what it got and what it wants; commands print it without a traceback."""
