import itertools

import pytest

from harness import profiles
from harness.case import Case
from harness.errors import UsageError
from harness.families import DDP, FAMILIES, FEED, GIB, H2D, MIB
from harness.plans import plan_h2d
from harness.suites import CHUNKS, SUITES, TIERS, grid, matches, select, without_profile

H200, CPU, GENERIC = (profiles.packaged()[name] for name in ("h200", "cpu", "generic"))
EVERY = [(profile, tier) for profile in (H200, GENERIC, CPU) for tier in TIERS]

# Stores know cases by these names: a change here cuts their history, and must be meant.
QUICK = {
    "h200": [
        "memory=pinned,stream=side,chunks=8,size=256MiB,ratio=1,gate=off",
        "memory=pinned,stream=default,chunks=8,size=256MiB,ratio=1,gate=off",
        "memory=pageable,stream=side,chunks=8,size=256MiB,ratio=1,gate=off",
        "memory=pageable,stream=default,chunks=8,size=256MiB,ratio=1,gate=off",
        "memory=pinned,stream=side,chunks=1,size=512MiB,ratio=1,gate=on",
        "memory=pinned,stream=side,chunks=2,size=512MiB,ratio=1,gate=on",
        "memory=pinned,stream=side,chunks=4,size=512MiB,ratio=1,gate=on",
        "memory=pinned,stream=side,chunks=8,size=512MiB,ratio=1,gate=on",
        "memory=pinned,stream=side,chunks=16,size=512MiB,ratio=1,gate=on",
        "memory=pinned,stream=side,chunks=32,size=512MiB,ratio=1,gate=on",
        "memory=pinned,stream=side,chunks=64,size=512MiB,ratio=1,gate=on",
    ],
    "cpu": [
        "memory=pinned,stream=side,chunks=8,size=128MiB,ratio=1,gate=off",
        "memory=pinned,stream=default,chunks=8,size=128MiB,ratio=1,gate=off",
        "memory=pageable,stream=side,chunks=8,size=128MiB,ratio=1,gate=off",
        "memory=pageable,stream=default,chunks=8,size=128MiB,ratio=1,gate=off",
        "memory=pageable,stream=side,chunks=1,size=128MiB,ratio=1,gate=on",
        "memory=pageable,stream=side,chunks=2,size=128MiB,ratio=1,gate=on",
        "memory=pageable,stream=side,chunks=4,size=128MiB,ratio=1,gate=on",
        "memory=pageable,stream=side,chunks=8,size=128MiB,ratio=1,gate=on",
    ],
}


def keys(profile, tier, patterns=()):
    return [case.key for case in select(["h2d"], tier, profile, patterns)]


def refusal(*arguments):
    with pytest.raises(UsageError) as caught:
        select(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("profile", [H200, CPU], ids=["h200", "cpu"])
def test_the_quick_tier_keeps_its_names(profile):
    assert keys(profile, "quick") == [f"h2d[{axes},profile={profile.key}]" for axes in QUICK[profile.name]]


@pytest.mark.parametrize(("profile", "tier"), EVERY, ids=lambda given: getattr(given, "name", given))
def test_every_case_stands_once_can_be_parsed_and_has_a_plan(profile, tier):
    cases = select(["h2d"], tier, profile)
    listed = [case.key for case in cases]
    assert len(set(listed)) == len(listed)
    for case in cases:
        assert Case.parse(case.key, FAMILIES) == case
        assert plan_h2d(case, profile).split.chunks == case["chunks"]


@pytest.mark.parametrize("profile", [H200, GENERIC, CPU], ids=lambda profile: profile.name)
def test_nightly_contains_quick_and_begins_with_it(profile):
    """A nightly run that is cut short has answered the question."""
    quick = keys(profile, "quick")
    nightly = keys(profile, "nightly")
    assert nightly[: len(quick)] == quick
    assert len(nightly) > len(quick)


def test_the_nightly_grid_on_cuda_covers_every_value_of_every_axis():
    cases = select(["h2d"], "nightly", H200)
    assert len(cases) >= 40
    seen = {axis.name: {case[axis.name] for case in cases} for axis in H2D.axes}
    for axis in H2D.axes:
        if hasattr(axis, "values"):
            assert seen[axis.name] == set(axis.values)
    assert seen["chunks"] == {1, 2, 4, 8, 16, 32, 64} == set(CHUNKS)
    assert {MIB, GIB} <= seen["size"]
    assert min(seen["ratio"]) < 1 < max(seen["ratio"])
    assert {case["issue"] for case in cases if case["gate"] == "on"} == {"alternate", "copies-first"}
    assert {case["issue"] for case in cases if case["gate"] == "off"} == {"alternate", "copies-first"}


@pytest.mark.parametrize(("profile", "tier"), EVERY, ids=lambda given: getattr(given, "name", given))
def test_every_tier_shows_the_whole_2x2_table_ungated_from_equal_cases(profile, tier):
    cases = [case for case in select(["h2d"], tier, profile) if case["gate"] == "off" and case["chunks"] == 8]
    first = cases[0]
    cells = {
        (case["memory"], case["stream"])
        for case in cases
        if case.replace(memory=first["memory"], stream=first["stream"]) == first
    }
    assert cells == {(memory, stream) for memory in ("pinned", "pageable") for stream in ("side", "default")}
    assert first["size"] >= 256 * MIB or profile is CPU


@pytest.mark.parametrize("profile", [H200, GENERIC], ids=lambda profile: profile.name)
def test_no_gated_cuda_case_is_one_that_is_never_gated(profile):
    """Pageable copies block the host behind a gate, and a driver queue takes about 500 launches behind one."""
    gated = [case for case in select(["h2d"], "nightly", profile) if case["gate"] == "on"]
    assert {case["memory"] for case in gated} == {"pinned"}
    assert max(plan_h2d(case, profile).launches for case in gated) <= 500


def test_every_tier_has_a_whole_chunk_curve_for_the_model():
    """The curve model is fitted on n = 1, 4, 16 and tested on the rest (measurement.md)."""
    curve = [case for case in select(["h2d"], "quick", H200) if case["gate"] == "on"]
    assert {case.replace(chunks=1) for case in curve} == {curve[0].replace(chunks=1)}
    assert tuple(case["chunks"] for case in curve) == CHUNKS
    assert curve[0]["size"] >= 256 * MIB


@pytest.mark.parametrize("profile", [H200, CPU], ids=lambda profile: profile.name)
def test_the_ddp_suite_covers_what_its_axes_offer_on_that_kind_of_device(profile):
    cases = select(["ddp"], "nightly", profile, ranks=4)
    assert len(set(cases)) == len(cases)
    assert {case["ranks"] for case in cases} == {4}
    assert {case["backend"] for case in cases} == {"gloo" if profile is CPU else "nccl"}
    assert {case["profile"] for case in cases} == {profile.key_of("ddp")}
    for axis in ("model", "gradients", "option"):
        assert {case[axis] for case in cases} == set(DDP.axis(axis).values), axis
    plain = [
        case for case in cases if case.replace(tokens=1, bucket=MIB) == cases[0].replace(tokens=1, bucket=MIB)
    ]
    by_cap: dict[int, list[int]] = {}
    for case in plain:
        by_cap.setdefault(case.number("bucket"), []).append(case.number("tokens"))
    assert len(by_cap) >= (3 if profile is CPU else 6)
    # For the threshold: three token counts or more of otherwise equal cases (harness/threshold.py).
    assert min(map(len, by_cap.values())) >= 3
    most = max(by_cap.values(), key=len)
    assert {after / before for before, after in itertools.pairwise(sorted(most))} == {2.0}
    assert set(select(["ddp"], "quick", profile, ranks=4)) <= set(cases)
    if profile is not CPU:
        assert {case["connections"] for case in cases} == {1, 8, 32}


@pytest.mark.parametrize("profile", [H200, CPU], ids=lambda profile: profile.name)
def test_the_feed_suite_covers_what_its_axes_offer_on_that_kind_of_device(profile):
    cases, quick = select(["feed"], "nightly", profile), select(["feed"], "quick", profile)
    assert len(set(cases)) == len(cases)
    assert cases[: len(quick)] == quick
    assert {case["profile"] for case in cases} == {profile.key_of("feed")}
    for axis in ("data", "source", "persistent", "batching"):
        assert {case[axis] for case in cases} == set(FEED.axis(axis).values), axis
    assert {case["memory"] for case in cases} == ({"pageable"} if profile is CPU else {"pinned", "pageable"})
    assert {case["prefetch"] for case in cases} == {2, 4}
    assert {case["start"] for case in cases} >= {"fork", "spawn"}
    assert len(quick) == 3
    # Each has a meaning: pictures are all alike, and no worker means no process to start or to keep.
    assert {case["batching"] for case in cases if case["data"] == "jpeg"} == {"padding"}
    alone = [case for case in cases if case["workers"] == 0]
    assert {(case["prefetch"], case["persistent"], case["start"]) for case in alone} == {(2, "on", "fork")}


def test_the_knee_of_loaders_is_looked_for_from_no_worker_to_all_cores():
    cases = select(["feed"], "nightly", H200)
    for data, memory in itertools.product(("jpeg", "text"), ("pinned", "pageable")):
        usual = Case.of(
            FEED, data=data, source="memory", workers=0, memory=memory, profile=H200.key_of("feed")
        )
        workers = {case.number("workers") for case in cases if case.replace(workers=0) == usual}
        assert {0, 2, 4, 8, 16} <= workers
        assert memory == "pageable" or {1, 12} < workers


def test_the_grid_takes_the_last_axis_fastest():
    made = grid(
        H2D, H200, memory="pinned", stream="side", chunks=(1, 2), size=MIB, ratio=1.0, gate=("on", "off")
    )
    assert [(case["chunks"], case["gate"]) for case in made] == [(1, "on"), (1, "off"), (2, "on"), (2, "off")]
    assert {case["profile"] for case in made} == {H200.key}


def test_suites_are_known_by_their_own_name_and_all_is_the_default():
    assert {name: suite.name for name, suite in SUITES.items()} == {name: name for name in SUITES}
    assert select([], "quick", H200) == select(SUITES, "quick", H200)
    assert select(["h2d", "h2d"], "quick", H200) == select(["h2d"], "quick", H200)


def test_a_pattern_is_a_glob_over_whole_keys_in_which_brackets_are_themselves():
    assert keys(H200, "nightly", ["*chunks=64*"]) == [
        key for key in keys(H200, "nightly") if "chunks=64," in key
    ]
    assert keys(H200, "quick", ["h2d[*]"]) == keys(H200, "quick")
    assert keys(H200, "quick", ["h2d[memory=page????,*]"]) == [
        key for key in keys(H200, "quick") if "pageable" in key
    ]
    # As a set of characters this would match every case with 8, 4 or 2 chunks.
    assert "matches none" in refusal([], "quick", H200, ["*chunks=[842],*"])


def test_several_patterns_give_their_cases_once_in_the_order_of_the_patterns():
    listed = keys(H200, "quick", ["*chunks=2,*", "*chunks=1,*", "*chunks=?,*"])
    assert [Case.parse(key, FAMILIES)["chunks"] for key in listed[:2]] == [2, 1]
    assert len(set(listed)) == len(listed)


def test_a_whole_key_may_leave_out_the_profile_and_need_not_be_in_the_suite():
    inside = QUICK["h200"][0]
    assert keys(H200, "quick", [f"h2d[{inside}]"]) == [f"h2d[{inside},profile={H200.key}]"]
    outside = "h2d[memory=pinned,stream=side,chunks=3,size=7MiB,ratio=1.5,gate=off]"
    for written in (outside, outside.replace("]", f",profile={H200.key}]")):
        assert keys(H200, "quick", [written]) == [outside.replace("]", f",profile={H200.key}]")]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("*chunks=5*", "matches none of the 21 cases of h2d, ddp, feed (quick); `overlap list`"),
        ("h2d", "matches none"),
        ("", "matches none"),
        ("chunks=8", "want family[axis=value,...]"),
        ("h2d[chunks=8]", "axes are missing"),
        ("h2d[memory=pinned,stream=side,chunks=0,size=1MiB,ratio=1,gate=on]", "chunks: got 0, want"),
        ("h2d[memory=pinned,stream=side,chunks=1,size=2GiB,ratio=1,gate=on]", "size: got 2GiB, want"),
        ("d2h[memory=pinned]", "got family 'd2h', want one of h2d"),
    ],
)
def test_a_pattern_without_a_case_is_refused(pattern, words):
    assert words in refusal([], "quick", H200, [pattern])


def test_one_wrong_pattern_spoils_the_rest():
    assert "matches none" in refusal([], "quick", H200, ["*chunks=8*", "*chunks=5*"])


def test_unknown_suites_and_tiers_are_refused_by_name():
    assert refusal(["h2d", "fsdp"], "quick", H200) == "suite: got 'fsdp', want one of h2d, ddp, feed"
    assert refusal([], "weekly", H200) == "tier: got 'weekly', want quick or nightly"


def test_a_pattern_is_a_key_with_or_without_its_profile_or_a_glob():
    key = "h2d[memory=pinned,stream=side,chunks=8,size=256MiB,ratio=1,gate=on,profile=h200.1a2b]"
    bare = "h2d[memory=pinned,stream=side,chunks=8,size=256MiB,ratio=1,gate=on]"
    assert without_profile(key) == bare == without_profile(bare)
    assert without_profile(key.replace("gate=on,profile=h200.1a2b", "profile=x.1,gate=on")) == bare
    for pattern in (key, bare, "*", "h2d[*chunks=8,*]", "h2d[*,profile=h200.*"):
        assert matches(pattern, key), pattern
    for pattern in ("h2d", bare[:-1], "h2d[*chunks=16*", "[h]2d*", bare.upper()):
        assert not matches(pattern, key), pattern


@pytest.mark.parametrize(("profile", "gates"), [(H200, ["on", "off"]), (CPU, ["on"])], ids=["h200", "cpu"])
def test_all_gpus_copy_at_once_beside_the_same_case_of_one(profile, gates):
    cases = select(["h2d"], "nightly", profile, ranks=4)
    together = [case for case in cases if case["ranks"] == 4]
    assert [case["gate"] for case in together] == gates
    assert {case.replace(ranks=1) for case in together} <= set(cases)
    assert all(case["ranks"] == 1 for case in select(["h2d"], "quick", profile, ranks=4))
