"""The side of every rank but 0 of a run that torchrun started: it takes part in job after job, by fresh processes.

It keeps no record, so nothing is lost with it. Why its process ended is told to rank 0, whose record says it.
"""

import os
import socket
import time

from harness.board import Board
from harness.child import Process, module
from harness.elastic import LOST_S
from harness.errors import MeasurementError
from harness.torchrun import Role

# How often rank 0 is asked whether there is a job. Each question is one for its host too.
POLL_S = 0.5


def follow(role: Role) -> None:
    """Take part until rank 0 says that the run is over; MeasurementError if it is gone."""
    board = Board.reach(role)
    board.add("came", 1)
    alive = _Alive(board)
    known = ""
    while not (now := board.now()).over:
        if now.meeting not in ("", known):
            known = now.meeting
            _take_part(role, board, known, now.environment, alive)
        else:
            alive.check()
            time.sleep(POLL_S)
    board.add("left", 1)


def _take_part(role: Role, board: Board, meeting: str, environment: dict[str, str], alive: "_Alive") -> None:
    """One process, until it ends or the meeting does without it."""
    who = role.name(socket.gethostname())
    try:
        process = Process(
            lambda events: [*module("ranks", events), str(os.getpid()), meeting],
            b"",
            0.0,
            who=who,
            variables=environment,
        )
    except OSError as error:
        board.tell(meeting, role.rank, f"no process could be started for {who}: {error.strerror}")
        return
    with process:
        while not process.ended(POLL_S):
            alive.check()
            if board.now().meeting != meeting or board.get(f"{meeting}/over"):
                process.refuse(f"{who} was left behind")
        if reason := process.end():
            board.tell(meeting, role.rank, reason)


class _Alive:
    """Whether rank 0 still says that the run goes on."""

    def __init__(self, board: Board) -> None:
        self._board, self._beats, self._heard = board, -1, time.monotonic()

    def check(self) -> None:
        beats, now = self._board.add("beat", 0), time.monotonic()
        if beats != self._beats:
            self._beats, self._heard = beats, now
        elif now - self._heard > LOST_S:
            raise MeasurementError(f"rank 0 gave no sign of life for {LOST_S:g} s")
