"""The registry: each metric once, and to each family its own."""

import dataclasses

import pytest

from harness.registry import METRICS, metrics_of


def test_registry_says_each_thing_once():
    assert len({metric.label for metric in METRICS.values()}) == len(METRICS)
    assert {name for name, metric in METRICS.items() if metric.asv} == {
        "overlapped_ms",
        "bound_ratio",
        "overlapped_over_compute",
        "transfer_ms",
        "compute_ms",
        "host_blocked_ms",
    }
    assert all(metric.unit == "ms" for name, metric in METRICS.items() if name.endswith("_ms"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        METRICS["overlapped_ms"].asv = False  # type: ignore[misc]


def test_a_family_has_what_it_can_measure_and_its_own_model():
    copies, collectives = metrics_of("h2d"), metrics_of("ddp")
    assert not {"tail_ms", "dilation_ms", "waiting_ms"} & set(copies)
    assert {"tail_ms", "dilation_ms", "waiting_ms", *copies} <= set(collectives)
    assert copies["model_ratio"].arms == ("transfer", "compute", "overlapped")
    assert collectives["model_ratio"].arms == ("model", "overlapped")
    assert {name for name in collectives if collectives[name].arms != METRICS[name].arms} == {"model_ratio"}


def test_a_loader_is_told_by_means_and_is_no_piece_of_a_pipeline():
    loaders, copies = metrics_of("feed"), metrics_of("h2d")
    assert not {"serial_ms", "overlapped_over_serial", "model_ratio", "host_ms", "compute_unsplit_ms"} & set(
        loaders
    )
    own = set(loaders) - set(copies)
    assert own == {
        "headroom", "gap_ms", "stall_share", "next_ms", "next_max_ms",
    }  # fmt: skip
    assert {metric.quantile for metric in loaders.values()} == {None, 0.1, 1.0}
    assert not any(metric.per_round for metric in loaders.values()), (
        "a round is no sample of a mean or a maximum"
    )
    assert copies["overlapped_ms"].quantile == 0.5
    assert {name for name, metric in METRICS.items() if metric.asv} <= set(loaders)
