"""Tests marked `gpu` and `multigpu` run where the devices are, and are skipped with the reason elsewhere."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needs = {"gpu": 1, "multigpu": 2}
    marked = [
        (item, count) for item in items for name, count in needs.items() if item.get_closest_marker(name)
    ]
    if not marked:
        return
    import torch

    here = torch.cuda.device_count()
    for item, count in marked:
        if here < count:
            item.add_marker(pytest.mark.skip(reason=f"needs {count} CUDA device(s), {here} here"))
