"""The command ``auxhead-plot``."""

from .commands import app

if __name__ == "__main__":
    app()
