"""Tests marked `gpu` and `multigpu` run where the devices are, and are skipped with the reason elsewhere.

Ctrl-C reaches what tests start, however they were started themselves.
"""

import contextlib
import os
import signal

import pytest

with contextlib.suppress(ImportError):  # a GPU image may have pytest and no more
    from hypothesis import settings

    # The same examples every time, or a change would fail for what another one did; OVERLAP_FUZZ=1 looks for new ones.
    settings.register_profile("steady", derandomize=not os.environ.get("OVERLAP_FUZZ"))
    settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> None:
    """A shell without job control starts what it leaves in the background (`make test &` in a script) with SIGINT
    ignored. Every process started from there inherits that, and one that a test interrupts would not notice."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = {"gpu": 1, "multigpu": 2}
    marked = [
        (item, count) for item in items for name, count in needs.items() if item.get_closest_marker(name)
    ]
    if not marked:
        return
    import torch

    # A run is invalid beside another process on its GPU, which this one is as soon as a test has used it.
    items.sort(key=lambda item: not any(mark.kwargs.get("alone") for mark in item.iter_markers("gpu")))
    here = torch.cuda.device_count()
    for item, count in marked:
        if here < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA device(s), {here} here"))
