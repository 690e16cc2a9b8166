"""Errors a user can act on. The command line prints them as one line; nothing else catches them to print."""


class OverlapError(Exception):
    """Base of every error this package raises on purpose; `exit_code` is the command line's (design: 2)."""

    exit_code = 2


class UsageError(OverlapError):
    """Wrong use or unreadable input: the message names the field, what was given, what is accepted."""


class RecordError(UsageError):
    """A record that cannot be read: unreadable, truncated, of a wrong type, or newer than this program."""


class Skip(OverlapError):
    """This case has no meaning here; the message is the reason shown to people."""


class MeasurementError(OverlapError):
    """A case could not be measured (a failed launch, a dead worker); the case is labelled `error`."""

    exit_code = 4
