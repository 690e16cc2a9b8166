"""A record for programs: what they need of it without reading its samples."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from harness import feeding
from harness.record import Record


def of(record: Record, path: Path) -> dict[str, Any]:
    """What `--json` prints of the record in `path`."""
    found = feeding.feeds(record)
    verdicts = {feed.case.key: {"verdict": feed.verdict} for feed in found}
    return {
        "record": str(path),
        "commit": record.run.commit,
        "machine": record.machine.name,
        "exit_code": exit_code(record),
        "statuses": dict(Counter(case.status for case in record.cases)),
        "controls": [msgspec.to_builtins(control) for control in record.controls],
        "ceilings": [msgspec.to_builtins(ceiling) for ceiling in record.ceilings],
        "cases": [
            {
                "key": case.key,
                "status": case.status,
                "reason": case.reason,
                "metrics": msgspec.to_builtins(case.metrics),
                "model": case.model,
                **verdicts.get(case.key, {}),
            }
            for case in record.cases
        ],
        "loaders": [
            {
                "cases": [feed.case.key for feed in scale.feeds],
                "workers": scale.workers,
                "knee": scale.knee,
                "workers_needed": scale.needed,
                "workers_needed_between": scale.needed_between,
            }
            for scale in feeding.scales(found)
            if len(scale.feeds) > 1
        ],
    }


def exit_code(record: Record) -> int:
    """The exit code of the run that made it: 4 some case invalid or failed, 3 nothing measured, else 0."""
    if any(case.status in ("invalid", "error") for case in record.cases):
        return 4
    return 0 if any(case.measured for case in record.cases) else 3
