import json

import msgspec
import pytest

from harness import profiles
from harness.errors import UsageError
from harness.profiles import FIXED_WORK, FOLDER, Profile, load_profile, packaged, profile_for, read_profile

H200 = FOLDER / "h200.json"


def changed(tmp_path, change, source=H200):
    """The packaged profile with `change` made to its JSON, in a file of its own."""
    content = json.loads(source.read_text())
    change(content)
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(content))
    return path


def numbers(value, place=()):
    """The place of every number in a JSON value."""
    if isinstance(value, dict):
        return [found for key, item in value.items() for found in numbers(item, (*place, key))]
    return [place] if isinstance(value, int | float) else []


def inner(content, place):
    for key in place[:-1]:
        content = content[key]
    return content


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_packaged_profiles_are_read_under_their_file_s_name(path):
    profile = read_profile(path)
    assert profile.name == path.stem
    assert packaged()[path.stem] == profile
    assert profile.element_bytes == {"bfloat16": 2, "float32": 4}[profile.dtype]
    assert profile.row_bytes == profile.width * profile.element_bytes
    assert profile.max_columns % profile.column_step == 0
    assert set(profile.h2d.columns) == set(profile.h2d.repeats) == {"pinned", "pageable"}


def test_the_generic_profile_has_the_sizes_of_the_h200():
    h200, generic = packaged()["h200"], packaged()["generic"]
    assert msgspec.structs.replace(generic, name="h200", summary=h200.summary, devices=h200.devices) == h200


def test_the_key_is_the_name_and_a_short_hash():
    for name, profile in packaged().items():
        head, _, digest = profile.key.rpartition(".")
        assert head == name
        assert len(digest) == 4
        assert set(digest) <= set("0123456789abcdef")


MENDABLE = {
    "summary", "devices", "sample_ms", "case_seconds", "ddp_case_seconds", "feed_case_seconds", "settled",
    "feed_settled", "tolerances",
}  # fmt: skip


def test_what_says_nothing_of_the_work_may_be_mended(tmp_path):
    def mend(content):
        content.update(summary="other", devices=["Other"], case_seconds=9.0, settled=0.02, sample_ms=3.0)
        content["tolerances"]["null"] = 0.01

    assert read_profile(changed(tmp_path, mend)).key == packaged()["h200"].key


@pytest.mark.parametrize(
    "place",
    [place for place in numbers(json.loads(H200.read_text())) if place[0] not in MENDABLE],
    ids=".".join,
)
def test_a_change_of_any_number_of_the_work_is_another_profile(tmp_path, place):
    def nudge(content):
        found = inner(content, place)
        found[place[-1]] = (
            found[place[-1]] * 0.999 if isinstance(found[place[-1]], float) else found[place[-1]] + 1
        )

    was, now = packaged()["h200"], read_profile(changed(tmp_path, nudge))
    families = {family for family in FIXED_WORK if now.key_of(family) != was.key_of(family)}
    assert families == ({place[0]} if place[0] in FIXED_WORK else families)
    assert families, "no case is of another key"


def test_another_dtype_or_a_size_more_is_another_profile(tmp_path):
    keys = {
        read_profile(changed(tmp_path, change)).key
        for change in (
            lambda content: None,
            lambda content: content.update(dtype="float32"),
            lambda content: content["h2d"]["columns"]["pinned"].update({"2MiB": 11520}),
            lambda content: content["h2d"]["repeats"]["pinned"].pop("4MiB"),
        )
    }
    assert len(keys) == 4


def test_the_key_stays_when_only_the_look_of_the_file_changes(tmp_path):
    content = json.loads(H200.read_text())

    def reordered(value):
        return {key: reordered(value[key]) for key in reversed(value)} if isinstance(value, dict) else value

    content["sample_ms"] = int(content["sample_ms"])  # 2 is 2.0
    for text in (
        json.dumps(content),
        json.dumps(reordered(content), indent=8),
        json.dumps(content, separators=(",", ":")),
    ):
        path = tmp_path / "other.json"
        path.write_text(text)
        assert read_profile(path).key == packaged()["h200"].key


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("width"), "missing required field `width`"),
        (lambda c: c.update(widht=1), "unknown field `widht`"),
        (lambda c: c["h2d"].update(rows={}), r"unknown field `rows`.*\$.h2d"),
        (lambda c: c["tolerances"].pop("null"), r"`null`.*\$.tolerances"),
        (lambda c: c.update(width="2048"), r"\$.width"),
        (lambda c: c.update(width=2048.5), r"\$.width"),
        (lambda c: c.update(width=None), r"\$.width"),
        (lambda c: c.update(width=0), r">= 1.*\$.width"),
        (lambda c: c.update(column_step=0), r"\$.column_step"),
        (lambda c: c.update(max_columns=-1), r"\$.max_columns"),
        (lambda c: c.update(rotate_bytes=0), r"\$.rotate_bytes"),
        (lambda c: c.update(width=1 << 70), r"\$.width"),
        (lambda c: c.update(seed=-1), r"\$.seed"),
        (lambda c: c.update(sample_ms=0), r"\$.sample_ms"),
        (lambda c: c.update(case_seconds=-4), r"\$.case_seconds"),
        (lambda c: c.update(settled=0), r"\$.settled"),
        (lambda c: c.update(conditioning_gemms=-1), r"\$.conditioning_gemms"),
        (lambda c: c["tolerances"].update(null=1.5), r"\$.tolerances.null"),
        (lambda c: c.update(dtype="int8"), r"\$.dtype"),
        (lambda c: c.update(distribution="uniform"), r"\$.distribution"),
        (lambda c: c.update(name="a b"), r"\$.name"),
        (lambda c: c.update(name="../a"), r"\$.name"),
        (lambda c: c.update(name=""), r"\$.name"),
        (lambda c: c["h2d"]["columns"].update(pinned={"64MB": 1}), r"columns.pinned: got '64MB'.*\$.h2d"),
        (lambda c: c["h2d"]["repeats"].update(pinned={"x": 1}), r"repeats.pinned: got 'x'.*\$.h2d"),
        (lambda c: c["h2d"]["repeats"].update(pinned={"64MiB": 0}), r">= 1.*\$.h2d"),
        (lambda c: c["h2d"].update(columns=[]), r"\$.h2d.columns"),
        (lambda c: c["feed"].update(patch=300), "feed: patch 300, crop 224, image 256: want none larger than the next"),
        (lambda c: c["feed"].update(crop=300), "feed: patch 16, crop 300, image 256"),
        (lambda c: c["feed"].update(conditioning=-1), r"\$.feed.conditioning"),
    ],
)  # fmt: skip
def test_a_wrong_profile_is_refused_with_the_place_in_one_line(tmp_path, change, words):
    path = changed(tmp_path, change)
    with pytest.raises(UsageError, match=words) as caught:
        read_profile(path)
    assert str(caught.value).startswith(f"profile: {path} is not a profile: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"{}x", b"[" * 100_000])
def test_what_is_no_profile_at_all_is_refused(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="is not a profile: "):
        read_profile(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*: No such file"):
        read_profile(tmp_path / "missing.json")
    with pytest.raises(UsageError, match=r"cannot read .*: Is a directory"):
        read_profile(tmp_path)


def test_a_profile_is_found_by_name_by_key_and_by_path(tmp_path):
    h200 = packaged()["h200"]
    assert load_profile("h200") is load_profile(h200.key) is h200
    path = changed(tmp_path, lambda content: content.update(name="mine"))
    assert load_profile(str(path)).name == "mine"


def test_a_name_with_a_dot_is_found_too(tmp_path, monkeypatch):
    """`overlap calibrate` accepts such a name, and the hash in a key comes after a dot as well."""
    profile = msgspec.structs.replace(packaged()["h200"], name="h200.nvl")
    (tmp_path / "h200.nvl.json").write_bytes(msgspec.json.encode(profile))
    (tmp_path / "h200.json").write_bytes(H200.read_bytes())
    monkeypatch.setattr(profiles, "FOLDER", tmp_path)
    packaged.cache_clear()
    try:
        assert load_profile("h200.nvl") == load_profile(profile.key) == profile
        assert load_profile("h200").name == "h200"
    finally:
        packaged.cache_clear()


@pytest.mark.parametrize("name", ["", "h100", "h200.", "h200.0000", "h200.zz", "H200", ".", "h200.json.gz"])
def test_an_unknown_profile_is_refused_with_the_known_ones(name):
    with pytest.raises(UsageError, match=r"profile: got '.*', want one of cpu\..*generic\..*h200\."):
        load_profile(name)


def test_yesterday_s_sizes_are_not_today_s(tmp_path):
    """A key with another hash names sizes that are gone: measuring with today's would be another case."""
    key = read_profile(changed(tmp_path, lambda content: content.update(seed=1))).key
    assert key.startswith("h200.")
    with pytest.raises(UsageError, match="profile: got"):
        load_profile(key)


@pytest.mark.parametrize(
    ("device", "name", "profile"),
    [
        ("cpu", "cpu", "cpu"),
        ("cpu", "NVIDIA H200", "cpu"),
        ("cuda", "NVIDIA H200", "h200"),
        ("cuda", "NVIDIA H200 NVL", "generic"),
        ("cuda", "", "generic"),
    ],
)
def test_a_device_gets_the_profile_of_its_model(device, name, profile):
    assert profile_for(device, name).name == profile


def test_no_device_has_two_profiles():
    devices = [device for profile in packaged().values() for device in profile.devices]
    assert len(set(devices)) == len(devices)


def test_a_profile_survives_the_way_to_a_worker():
    for profile in packaged().values():
        again = msgspec.json.decode(msgspec.json.encode(profile), type=Profile)
        assert again == profile
        assert again.key == profile.key
