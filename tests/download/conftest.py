"""Fixtures of the download tests."""

from _download_server import running_server

__all__ = ["running_server"]
