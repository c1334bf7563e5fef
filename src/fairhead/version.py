"""The version: that of the latest git tag, as the installed package has it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("fairhead")
except PackageNotFoundError:  # the source alone, not installed
    __version__ = "0+unknown"
