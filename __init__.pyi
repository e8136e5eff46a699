from .model import *  # noqa: F403
from .model import __version__ as __version__
