"""`atoll compare RUN RUN...`."""

from atoll.cli.report import main_compare as main

__all__ = ["main"]
