"""Clocks and the scripted link."""

import time
from typing import Any

import pytest
import torch

from harness.workloads.collectives import CudaTimeline, HostTimeline, Scripted, completed


def test_marks_are_counted_from_the_beginning_and_forgotten_with_it() -> None:
    timeline = HostTimeline()
    timeline.begin()
    time.sleep(0.02)
    timeline.mark("a")
    assert timeline.ms("a") >= 20
    timeline.begin()
    with pytest.raises(KeyError):
        timeline.ms("a")


@pytest.mark.gpu
def test_a_mark_on_a_stream_is_when_that_stream_gets_there() -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    timeline = CudaTimeline(main)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1)  # loads the kernel, which takes the host some ms
    timeline.begin()
    timeline.mark("side", side)
    timeline.mark("main")
    for _ in range(2):
        torch.cuda.synchronize()
        timeline.begin()
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
        timeline.mark("side", side)
        timeline.mark("main")
        torch.cuda.synchronize()
        assert timeline.ms("main") < 5 < timeline.ms("side")
    timeline.begin()
    with pytest.raises(KeyError):
        timeline.ms("side")


@pytest.fixture
def link() -> Any:
    made = Scripted(10.0, 10.0 / 4096)
    yield made
    made.close()


@pytest.mark.timing
def test_a_scripted_link_takes_one_buffer_after_another_at_its_cost(link: Scripted) -> None:
    buffers = [torch.zeros(1024), torch.zeros(2048), torch.zeros(1024)]
    ends: list[float] = []
    began, used = time.perf_counter(), time.process_time()
    futures = [
        link.all_reduce(buffer, lambda _: ends.append(time.perf_counter() - began)) for buffer in buffers
    ]
    assert time.perf_counter() - began < 0.01
    for future, buffer in zip(futures, buffers, strict=True):
        assert future.wait() is buffer
    assert [link.cost_ms(buffer.nbytes) for buffer in buffers] == [20.0, 30.0, 20.0]
    for end, expected in zip(ends, (20, 50, 70), strict=True):
        assert expected <= end * 1e3 < expected + 10
    assert time.process_time() - used < 0.03, "it sleeps"


def test_an_idle_scripted_link_starts_when_it_is_asked(link: Scripted) -> None:
    link.all_reduce(torch.zeros(1), lambda _: None).wait()
    time.sleep(0.03)
    began = time.perf_counter()
    link.all_reduce(torch.zeros(1), lambda _: None).wait()
    assert time.perf_counter() - began >= 0.01


class Broken:
    averages, carries = False, True

    def all_reduce(self, buffer: torch.Tensor, done: Any, *, last: bool = True) -> Any:
        raise RuntimeError("the peer is gone")


def test_what_goes_wrong_behind_a_scripted_link_is_raised_where_it_is_waited_for() -> None:
    link = Scripted(0.0, 0.0, before=Broken())
    assert (link.averages, link.carries) == (False, True)
    future = link.all_reduce(torch.zeros(1), lambda _: None)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        future.wait()
    link.close()


def test_a_completed_future_gives_its_buffer() -> None:
    buffer = torch.zeros(3)
    future = completed(buffer)
    assert future.done()
    assert future.wait() is buffer


@pytest.mark.gpu
def test_on_a_gpu_a_completed_future_gives_its_buffer() -> None:
    buffer = torch.zeros(3, device="cuda")
    assert completed(buffer).wait() is buffer
