"""The ranks of a job on this machine: `python -m harness.launching FD` starts them and says why one failed.

It is torch elastic's agent, as torchrun is. It reads a job from stdin, which its ranks (harness/ranks.py) inherit;
rank 0's standard output is the file descriptor FD, to which it writes events.
"""

import contextlib
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from typing import IO

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from harness import devices, host
from harness.child import signal_words
from harness.protocol import JOBS, Failed, reason
from harness.serving import Say, serve
from harness.torchrun import ANOTHERS, LATE, OWN

_LAST_WORDS_BYTES = 1 << 16


def command() -> tuple[str, ...]:
    """The program of one rank and its arguments."""
    return sys.executable, "-P", "-m", "harness.ranks", "1", str(os.getpid()), "0"


class Logs(LogsSpecs):
    """What each rank prints goes to a file that has no name, so that none is left behind however this process ends.

    Rank 0's standard output is the pipe of events; what the ranks themselves print is all on standard error.
    """

    def __init__(self, ranks: int, events: int) -> None:
        super().__init__()
        self._files: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(ranks)]  # noqa: SIM115
        self._events = events

    @property
    def root_log_dir(self) -> str:
        return ""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nowhere = dict.fromkeys(envs, os.devnull)
        return LogsDest(
            stdouts=nowhere | {0: f"/dev/fd/{self._events}"},
            stderrs={rank: f"/dev/fd/{self._files[rank].fileno()}" for rank in envs},
            error_files=nowhere,
        )

    def close(self) -> None:
        for file in self._files:
            file.close()

    def lines(self, rank: int) -> list[str]:
        """The last lines that a rank printed."""
        file = self._files[rank]
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_WORDS_BYTES))
        return file.read().decode(errors="replace").strip().splitlines()


def launch(ranks: int, events: int) -> str:
    """Start the ranks and wait for them; why they ended before their work was done, empty if they did not."""
    # One machine needs no other network, and its name may lead to an address that it does not have.
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, devices.cores() // ranks)))
    # The store must be this process's: it is asked why a rank is lost when rank 0 may be the one.
    os.environ.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    program, *arguments = command()
    os.lseek(0, 0, os.SEEK_SET)  # rank 0 reads the job again
    kills = host.oom_kills()
    with contextlib.closing(Logs(ranks, events)) as logs:
        try:
            elastic_launch(_config(ranks, logs), program)(*arguments)
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            return blame(codes, logs.lines, kills)
        except SignalException:
            return "stopped"  # by the parent, which knows why
    return ""


def _config(ranks: int, logs: Logs) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        role="rank",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=logs,
    )


def blame(codes: Mapping[int, int], lines: Callable[[int], list[str]], oom_kills: int | None) -> str:
    """Why a job ended, of the exit codes of its ranks that failed, those found first before the others.

    When one rank is lost the others fail for it: by an error that says so, by NCCL's watchdog, which aborts them, or
    by the agent's SIGTERM. lines: what a rank printed. oom_kills: what host.oom_kills said before.
    """
    last = {rank: printed[-1] for rank in codes if (printed := lines(rank))}
    late = next(
        (last[rank] for rank, code in codes.items() if code == ANOTHERS and LATE in last.get(rank, "")), None
    )
    if late and all(code in (ANOTHERS, -signal.SIGTERM, -signal.SIGKILL) for code in codes.values()):
        # Who did not come in time is stopped, or hangs where no SIGTERM reaches it, and was killed for that alone.
        return late
    rank = min(codes, key=lambda rank: _suspicion(codes[rank]))
    code, printed = codes[rank], lines(rank)
    if code in (OWN, ANOTHERS) and printed:
        return printed[-1]
    if code > 0:
        return f"rank {rank} ended with exit code {code}: {printed[-1] if printed else 'it printed nothing'}"
    # An exception that nothing catches in C++, such as that of NCCL's watchdog, is printed before what aborts it.
    what = next((line.partition("what():")[2].strip() for line in printed if "what():" in line), "")
    said = f": {what}" if what and -code == signal.SIGABRT else ""
    return f"rank {rank} was killed by {signal_words(-code, oom_kills)}{said}"


def _suspicion(code: int) -> int:
    """The lower, the sooner the rank that ended with this code is to blame for the others."""
    if code < 0:
        return {int(signal.SIGABRT): 2, int(signal.SIGTERM): 4}.get(-code, 0)
    return 3 if code == ANOTHERS else 1


def work(asked: bytes, say: Say) -> None:
    """Launch the job; a failure is said when its ranks are gone."""
    job = JOBS.decode(asked)
    if failed := launch(job.ranks or 1, int(sys.argv[1])):
        say(Failed(reason=reason(failed)))


def main() -> int:
    """Entry of the agent's process; 0 also when it has said that a rank failed."""
    return serve(work)


if __name__ == "__main__":
    sys.exit(main())
