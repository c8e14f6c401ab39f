# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in the lab, in the words of who uses it."""


class LabError(Exception):
    """Base of everything the lab raises on purpose."""


class LabNotRunning(LabError):
    """The operation needs a running lab."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f'Lab "{name}" is not running; start it with '
            f'"python -m lab --name {name} up".')


class NotFound(LabError):
    """The lab has no such node, service or place."""


class StartFailed(LabError):
    """A process did not come up; carries the end of its log."""

    def __init__(self, what: str, reason: str, log: object,
                 tail: str = '') -> None:
        message = f'{what} did not start: {reason}. Its log is {log}'
        if tail:
            message += ', which ends with:\n' + tail
        super().__init__(message)


class CommandFailed(LabError):
    """A command on a node or in the namespace ended with an error."""

    def __init__(self, where: str, command: list[str], returncode: int,
                 stdout: str, stderr: str) -> None:
        self.returncode = returncode
        self.stdout = stdout
        self.stderr = stderr
        super().__init__(
            f'"{" ".join(command)}" on {where} ended with status '
            f'{returncode}: {(stderr or stdout).strip()}')


class CommandTimeout(LabError):
    """A command took too long and was killed."""

    def __init__(self, where: str, command: list[str],
                 timeout: float) -> None:
        super().__init__(
            f'"{" ".join(command)}" on {where} was killed: it took longer '
            f'than {timeout:g} seconds.')


class NodeUnreachable(LabError):
    """The agent of a node does not answer."""

    def __init__(self, name: str, reason: object) -> None:
        super().__init__(
            f'Node "{name}" does not answer ({reason}); look at its console '
            f'with "python -m lab logs {name}", power it on with '
            f'"python -m lab start {name}".')
