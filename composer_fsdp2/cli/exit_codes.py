"""How `composer-fsdp2` ends: the exit codes of every command."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["EXIT_CODES", "ExitCode"]


class ExitCode(IntEnum):
    """Exit codes of every command.

    A process that a signal ends has 128 plus the number of the signal, as in every shell.
    """

    OK = 0
    """done, and the answer is good"""
    FAILED = 1
    """done, and the answer is bad: the run failed or would fail, the files differ or are damaged"""
    USAGE = 2
    """not begun: a mistake in the command line, the YAML or a path, which the message names"""


EXIT_CODES = (
    "Exit codes of every command: 0 if all is well; 1 if the work was done and the answer is bad "
    "(a run failed or would fail, a checkpoint is damaged, two things differ); 2 if it was not "
    "begun, because of a mistake in the command line, the YAML or a path; 128 plus the number of "
    "a signal that ended it."
)
"""the same for `--help`"""
