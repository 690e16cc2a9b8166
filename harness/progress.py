"""How far a run is, on a console that the command line gives."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness import protocol
from harness.labels import count, short_names
from harness.protocol import Begin, ControlDone, Done, Event, Ready
from harness.record import Record
from harness.supervise import Plan, Watch, lacking


@contextlib.contextmanager
def live(stream: Console, plan: Plan, kept: Record) -> Iterator[Watch]:
    """A live line on a terminal, a line per finished case elsewhere.

    Yields what `supervise.run` calls with every event.
    """
    names = short_names(plan.cases)
    total = sum(len(lacking(plan, kept, launch)) for launch in range(plan.launches))
    finished = 0
    profiles = ", ".join(dict.fromkeys(case.word("profile") for case in plan.cases))
    launches = f", {plan.launches} launches" if plan.launches > 1 else ""
    stream.print(
        f"{count(len(plan.cases), 'case')}{launches} on {plan.device.name}, profile {profiles}",
        soft_wrap=True,
    )
    with Progress(
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=stream,
        disable=not stream.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task("opening the device", total=total)

        def watch(event: Event, launch: int) -> None:
            nonlocal finished, total
            if isinstance(event, Ready):
                bar.update(task, description="controls" if plan.controls else "")
            elif isinstance(event, ControlDone) and not event.control.passed:
                stream.print(f"control failed: {event.control.name}", style="bold red", soft_wrap=True)
            elif isinstance(event, Begin):
                bar.update(task, description=names[event.key])
            elif isinstance(event, protocol.Progress):
                bar.update(task, description=f"{names[event.key]}  {event.rounds} rounds")
            elif isinstance(event, Done):
                finished += 1
                if event.status in ("skipped", "error") and not event.out_of_time:
                    total -= plan.launches - 1 - launch  # it is not asked again in later launches
                bar.update(task, completed=finished, total=max(finished, total))
                if not stream.is_terminal or event.status in ("invalid", "error"):
                    reason = f": {event.reason}" if event.reason else ""
                    stream.print(
                        f"[{finished}/{max(finished, total)}] {names[event.key]}: {event.status}{reason}",
                        soft_wrap=True,
                    )

        yield watch
