"""One test per case; conftest.py makes them. asv imports this file too, where there may be no pytest."""


def test_overlap(request, benchmark, case):
    """Device times of the overlapped arm. A skipped case is a skip; one whose numbers are not to be believed fails."""
    import pytest

    from benchmarks import conftest
    from harness import pytest_feed

    if benchmark.disabled:
        pytest.skip("nothing to do without measuring (--benchmark-disable)")
    kept = conftest.measured(request)
    found = kept.case(case)
    if found.status == "skipped":
        pytest.skip(found.reason)
    if not found.measured:
        pytest.fail(f"{found.status}: {found.reason}", pytrace=False)
    feed = conftest.feed(request.config)
    samples = pytest_feed.samples_s(found)
    benchmark.extra_info |= pytest_feed.extra_info(found, kept, feed.path)
    benchmark.pedantic(feed.clock.show, (iter(samples),), setup=feed.clock.reset, rounds=len(samples))
