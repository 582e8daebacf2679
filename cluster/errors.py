"""What the operator did or asked for that cannot work, told in one line."""

from __future__ import annotations


class OperatorError(Exception):
    """Its message is one sentence: what is wrong and what to do. The CLI prints it and no traceback, exit status 2."""


class NoSuchModel(OperatorError):
    """The model named by `--model` cannot be found, read or converted."""


class PortInUse(OperatorError):
    """Another process listens where the cluster should."""


class AlreadyUp(OperatorError):
    """A cluster of this name runs already."""


class StartFailed(OperatorError):
    """A stage of the start failed; everything started before it has been ended."""
