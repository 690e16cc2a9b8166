"""What torch raises because of a worker, in one line."""

import os
import signal
import subprocess
import sys
import time

import pytest

from harness.workloads.feed_faults import exit_words, unheard, worker_words

TRACEBACK = """Caught KeyError in DataLoader worker process 3.
Original Traceback (most recent call last):
  File "/home/me/loop.py", line 302, in _worker_loop
    data = fetcher.fetch(index)
KeyError: 'label'
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("DataLoader worker (pid 12) is killed by signal: Killed. ",
         "loader worker 1 of 2 was killed by SIGKILL (out of memory, or killed by hand)"),
        ("DataLoader worker (pid 11) is killed by signal: Bus error. It is possible that dataloader's workers are out "
         "of shared memory. Please try to raise your shared memory limit.",
         "loader worker 0 of 2 was killed by SIGBUS (/dev/shm is full)"),
        ("DataLoader worker (pid 13) is killed by signal: Unknown signal 60. ",
         "loader worker (process 13) of 2 was killed by Unknown signal 60"),
        ("DataLoader worker (pid 12) exited unexpectedly with exit code 7. Details are lost due to multiprocessing.",
         "loader worker 1 of 2 ended by itself with exit code 7"),
        ("DataLoader worker (pid(s) 11, 12) exited unexpectedly", "loader worker 0, 1 of 2 ended by itself"),
        ("DataLoader timed out after 2.5 seconds", "the loader gave no batch for 2.5 s"),
        (TRACEBACK, "loader worker 3 of 2: KeyError: 'label'"),
        (TRACEBACK.replace("DataLoader worker process 3", "pin memory thread for device 0"),
         "the loader's pin thread: KeyError: 'label'"),
        (str(BlockingIOError(11, os.strerror(11))),
         "no more processes or threads may be started here, with 2 workers asked for; take fewer workers or raise the "
         "limit (ulimit -u, or pids.max of a container)"),
        ("can't start new thread", "no more processes or threads may be started here, with 2 workers asked for; take "
         "fewer workers or raise the limit (ulimit -u, or pids.max of a container)"),
        ("CUDA error: an illegal memory access was encountered", None),
    ],
)  # fmt: skip
def test_what_torch_says_of_a_worker_in_one_line(text: str, words: str | None) -> None:
    assert worker_words(text, [11, 12]) == words


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (-9, "was killed by SIGKILL (out of memory, or killed by hand)"),
        (-11, "was killed by SIGSEGV"),
        (0, "ended by itself with exit code 0"),
        (3, "ended by itself with exit code 3"),
    ],
)
def test_an_exit_code_in_words(code: int, words: str) -> None:
    assert exit_words(12, code, [11, 12]) == f"loader worker 1 of 2 {words}"


def test_nothing_is_raised_of_a_child_that_ends_and_then_all_is_as_before() -> None:
    def loud(*_: object) -> None:
        raise RuntimeError("a child has ended")

    def end_a_child() -> None:
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)
        time.sleep(0.01)

    before = signal.signal(signal.SIGCHLD, loud)
    try:
        with unheard():
            end_a_child()
        assert signal.getsignal(signal.SIGCHLD) is loud
        with pytest.raises(RuntimeError, match="a child has ended"):
            os.kill(os.getpid(), signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)
