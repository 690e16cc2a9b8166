"""`pytest benchmarks/ --benchmark-only`: the cases of `overlap run` as tests, their device times as the samples.

One measurement, made when the first test needs it, serves all of them: the workers and the record of `overlap run`.
Read from the environment (README, "pytest-benchmark"):
    OVERLAP_CASE        patterns over case keys, as --case; several are parted by blanks
    OVERLAP_TIER, OVERLAP_DEVICE, OVERLAP_LAUNCHES, OVERLAP_MACHINE, OVERLAP_RESULTS    as the options of `overlap run`
    OVERLAP_RECORD      take the numbers from this record instead of measuring

asv imports this file with its suite: in environments without pytest, and of commits with another harness. So a hook
imports what it needs.
"""

import contextlib
import os
import warnings

SUITE = "test_overlap.py"

# Under this name a saved run tells what must be equal before two numbers are compared.
IDENTITY = "overlap"


def pytest_configure(config):
    # A test that fails for want of a number has said why; where warnings are errors, this would be one more.
    config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used")


def pytest_sessionstart(session):
    # Nor is it an error of its own that no case has a number. pytest-benchmark says so outside of pytest's filters.
    warnings.filterwarnings("default", "Not saving anything")


def pytest_collection(session):
    # What is wrong with the selection ends pytest here; later it would be an error in a file.
    feed(session.config)


def pytest_generate_tests(metafunc):
    """One test per case; no device is opened and nothing is measured."""
    if metafunc.definition.path.name == SUITE:
        keys = feed(metafunc.config).keys()
        metafunc.parametrize("case", keys, ids=keys)


def pytest_collection_modifyitems(config, items):
    import pytest

    for item in _ours(items):
        item.add_marker(pytest.mark.benchmark(timer=feed(config).clock))
        if config.pluginmanager.hasplugin("timeout"):
            # The first test measures for all of them, in workers with limits of their own.
            item.add_marker(pytest.mark.timeout(0))


def pytest_benchmark_generate_machine_info(config):
    """Without what changes from night to night on one kind of machine, such as the host's name."""
    kept = feed(config)
    return {"machine": kept.told().machine.name, IDENTITY: kept.identity()}


def pytest_benchmark_update_commit_info(config, commit_info):
    run = feed(config).told().run
    if run.commit != "none":
        commit_info |= {"id": run.commit, "dirty": bool(run.dirty)}


def pytest_benchmark_compare_machine_info(config, machine_info, compared_benchmark):
    """Refuse a baseline of other hardware, software or method before anything is measured."""
    _check_comparable(config, compared_benchmark)
    # pytest-benchmark would warn of whatever differs otherwise, and of what only the measurement will tell.
    machine_info.clear()
    machine_info.update(compared_benchmark["machine_info"])


def pytest_terminal_summary(terminalreporter, config):
    kept = getattr(config, "_overlap_feed", None)
    if kept is not None and kept.taken:
        for note in (f"record: {kept.path}", *_notes(config, kept)):
            terminalreporter.write_line(f"overlap: {note}")


def feed(config):
    """The one of this run of pytest (harness/pytest_feed.py); what `overlap run` refuses ends pytest with one line."""
    import pytest

    from harness import pytest_feed
    from harness.errors import OverlapError

    if not hasattr(config, "_overlap_feed"):
        try:
            config._overlap_feed = pytest_feed.Feed(pytest_feed.Asked.by(os.environ))
            config._overlap_feed.keys()
        except OverlapError as error:
            raise pytest.UsageError(str(error)) from None
    return config._overlap_feed


def measured(request):
    """The record of every case that is to be tested, measured on the first call."""
    import pytest

    from harness.errors import OverlapError

    kept = feed(request.config)
    if not kept.taken:
        keys = [item.callspec.params["case"] for item in _ours(request.session.items)]
        try:
            kept.take(keys, lambda line: _say(request.config, line))
            # Some versions are known only now.
            for baseline in _baselines(request.config):
                _check_comparable(request.config, baseline)
        except (OverlapError, pytest.UsageError) as error:
            pytest.exit(str(error), returncode=pytest.ExitCode.USAGE_ERROR)
    return kept.told()


def _say(config, line):
    """A line while a test runs, whose own output pytest holds back."""
    find = config.pluginmanager.getplugin
    if reporter := find("terminalreporter"):
        capture = find("capturemanager")
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            reporter.ensure_newline()
            reporter.write_line(f"overlap: {line}")


def _ours(items):
    return [item for item in items if item.path.name == SUITE]


def _check_comparable(config, baseline):
    """Wrong use, exit code 4, and never 1, which is a regression's and a failed test's."""
    import pytest

    from harness import comparable

    told = (baseline.get("machine_info") or {}).get(IDENTITY)
    why = "it does not tell what it was measured on"
    if told is not None:
        why = "; ".join(map(str, comparable.contradictions(told["hard"], feed(config).identity()["hard"])))
    if why:
        raise pytest.UsageError(f"not comparable with {_which(baseline)}: {why}")


def _which(baseline):
    commit = str((baseline.get("commit_info") or {}).get("id"))[:8]
    return f"the saved run of {str(baseline.get('datetime'))[:19]} at commit {commit}"


def _baselines(config):
    """The saved runs that --benchmark-compare chose."""
    saved, chosen = (
        config.pluginmanager.getplugin("pytest-benchmark"),
        config.getoption("benchmark_compare", None),
    )
    if not saved or not chosen:
        return []
    return [
        data
        for _, data in (list(saved.storage.load())[-1:] if chosen is True else saved.storage.load(chosen))
    ]


def _notes(config, kept):
    """What a comparison leaves unsaid: cases without a number in the saved run, and what else differs from it."""
    from harness import comparable

    for baseline in _baselines(config):
        known = {each["extra_info"].get("case") for each in baseline["benchmarks"]}
        new = [case.key for case in kept.told().cases if case.measured and case.key not in known]
        if new:
            yield f"no number in {_which(baseline)} for {len(new)} cases: {', '.join(new)}"
        soft = comparable.contradictions(baseline["machine_info"][IDENTITY]["soft"], kept.identity()["soft"])
        if soft:
            yield f"{_which(baseline)} differs in {'; '.join(map(str, soft))}"
