"""What torch raises because of a loader's worker, in one line of what happened, and when it must not raise."""

import contextlib
import re
import signal
import threading
from collections.abc import Iterator, Sequence

BY_ITSELF = "ended by itself"


def worker_words(text: str, processes: Sequence[int]) -> str | None:
    """What a message of DataLoader, or of the start of its workers, says, in one line; None for one of another kind.

    processes: of the workers, by their number.
    """
    of = f"of {len(processes)}"
    if re.match(r"\[Errno 11\] |can't start new thread", text):
        return (
            f"no more processes or threads may be started here, with {len(processes)} workers asked for; take fewer "
            "workers or raise the limit (ulimit -u, or pids.max of a container)"
        )
    if found := re.match(r"Caught \w+ in DataLoader worker process (\d+)\.", text):
        return f"loader worker {found[1]} {of}: {_last_words(text)}"
    if text.startswith("Caught ") and " in pin memory thread" in text.splitlines()[0]:
        return f"the loader's pin thread: {_last_words(text)}"
    if found := re.match(r"DataLoader timed out after (\S+) seconds", text):
        return f"the loader gave no batch for {float(found[1]):g} s"
    if not (found := re.match(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.*)", text)):
        return None
    who = _who([int(pid) for pid in found[1].split(",")], processes)
    if killed := re.match(r"is killed by signal: ([^.]+)\.", found[2]):
        return f"{who} was killed by {_signal_words(killed[1])}"
    code = re.search(r"exit code (\d+)", found[2])
    return f"{who} {BY_ITSELF}" + (f" with exit code {code[1]}" if code else "")


def exit_words(pid: int, code: int, processes: Sequence[int]) -> str:
    """The same of a worker's exit code, as multiprocessing has it: a signal's number below zero."""
    who = _who([pid], processes)
    if code >= 0:
        return f"{who} {BY_ITSELF} with exit code {code}"
    return f"{who} was killed by {_signal_words(signal.strsignal(-code) or str(-code))}"


def _who(pids: Sequence[int], processes: Sequence[int]) -> str:
    numbers = [str(processes.index(pid)) if pid in processes else f"(process {pid})" for pid in pids]
    return f"loader worker {', '.join(numbers)} of {len(processes)}"


def _last_words(text: str) -> str:
    """The line of a traceback that names the error."""
    lines = [line for line in text.splitlines()[1:] if re.match(r"[A-Za-z_][\w.]*: ", line)]
    return lines[-1] if lines else text.splitlines()[0]


def _signal_words(said: str) -> str:
    """The name of a signal that torch calls by what strsignal says, and what it mostly means."""
    names = {signal.strsignal(number): number.name for number in signal.Signals}
    name = names.get(said.strip(), said.strip())
    likely = {"SIGKILL": "out of memory, or killed by hand", "SIGBUS": "/dev/shm is full"}.get(name)
    return f"{name} ({likely})" if likely else name


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Without what torch would raise, in the middle of anything, of a child that ends."""
    if threading.current_thread() is not threading.main_thread():
        yield  # it does so in the main thread alone
        return
    heard = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
    with contextlib.suppress(RuntimeError):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the first may have raised what was still to be said
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, heard)
