"""Made samples cost what real ones do, and each is a function of its seed."""

import io
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image

from harness.workloads import samples
from harness.workloads.samples import decode_jpeg, make_jpegs, make_texts, rng_of, token_counts, tokenise


def bits_per_pixel(files: list[bytes], side: int) -> float:
    return 8 * float(np.mean([len(file) for file in files])) / side**2


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=samples.QUALITY)
    return file.getvalue()


@pytest.mark.parametrize("side", [32, 100, 256])
def test_pictures_are_jpeg_files_of_the_side_asked_for(side: int) -> None:
    for file in make_jpegs(3, side, seed=1):
        with Image.open(io.BytesIO(file)) as picture:
            picture.load()
            assert (picture.format, picture.size, picture.mode) == ("JPEG", (side, side), "RGB")


def test_without_pillow_there_are_texts_and_a_reason_for_no_pictures() -> None:
    code = """
import sys
sys.modules["PIL"] = None  # importing it fails
from harness.errors import Skip
from harness.workloads.samples import make_jpegs, make_texts
assert len(make_texts(3, 10, seed=1)) == 3
try:
    make_jpegs(1, 32, seed=1)
except Skip as skip:
    print(skip)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "pictures need Pillow, and it is not installed; pip install pillow\n"


def test_pictures_are_fixed_by_their_seed_and_all_different() -> None:
    files = make_jpegs(50, 64, seed=1)
    assert files == make_jpegs(50, 64, seed=1)
    assert len(set(files) | set(make_jpegs(50, 64, seed=2))) == 100


def test_pictures_compress_like_photographs_and_not_like_noise_or_a_plain() -> None:
    """2 to 4 bits a pixel; noise takes more and one colour next to nothing."""
    rng = np.random.default_rng(0)
    noise = encoded(rng.integers(0, 256, (256, 256, 3), dtype=np.uint8))
    plain = encoded(np.full((256, 256, 3), 99, dtype=np.uint8))
    assert bits_per_pixel([plain], 256) < 0.5
    assert 2 < bits_per_pixel(make_jpegs(32, 256, seed=3), 256) < 4
    assert bits_per_pixel([noise], 256) > 6


def test_the_spectrum_falls_as_that_of_natural_pictures() -> None:
    side, amplitude = 128, 0.0
    for file in make_jpegs(32, side, seed=4):
        with Image.open(io.BytesIO(file)) as picture:
            light = np.asarray(picture.convert("L"), dtype=float)
        window = np.hanning(side)[:, None] * np.hanning(side)
        amplitude = amplitude + np.abs(np.fft.fft2((light - light.mean()) * window))
    radius = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side)) * side
    rings = np.arange(4, side // 4)
    means = [amplitude[np.round(radius) == ring].mean() for ring in rings]
    slope = np.polyfit(np.log(rings), np.log(means), 1)[0]
    assert -1.5 < slope < -0.9


def test_a_decoded_picture_is_fixed_by_seed_epoch_and_index() -> None:
    file = make_jpegs(1, 96, seed=1)[0]
    picture = decode_jpeg(file, 48, rng_of(7, 2, 30))
    assert (picture.dtype, picture.shape) == (torch.uint8, (3, 48, 48))
    assert picture.is_contiguous()
    assert torch.equal(picture, decode_jpeg(file, 48, rng_of(7, 2, 30)))
    for other in (rng_of(8, 2, 30), rng_of(7, 3, 30), rng_of(7, 2, 31)):
        assert not torch.equal(picture, decode_jpeg(file, 48, other))


def test_half_the_pictures_are_mirrored_and_none_is_turned() -> None:
    """Of a picture that is brighter to the right and, in blue, to the bottom."""
    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    right = np.tile(ramp, (64, 1))
    file = encoded(np.stack([right, right, right.T], axis=-1))
    mirrored = 0
    for index in range(400):
        red, _, blue = decode_jpeg(file, 32, rng_of(0, 0, index)).float()
        mirrored += bool(red[:, :8].mean() > red[:, -8:].mean())
        assert blue[:8].mean() < blue[-8:].mean()
    assert 150 < mirrored < 250


def test_parts_have_the_areas_and_aspects_of_a_random_resized_crop() -> None:
    rng = np.random.default_rng(0)
    boxes = np.array([samples._box(256, 256, rng) for _ in range(2000)])
    left, top, right, bottom = boxes.T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (right <= 256).all()
    assert (bottom <= 256).all()
    area = (right - left) * (bottom - top) / 256**2
    aspect = (right - left) / (bottom - top)
    assert area.min() < 0.1 < 0.9 < area.max() <= 1
    assert 0.74 < aspect.min() < 0.78 < 1.28 < aspect.max() < 1.36


def test_of_a_picture_that_no_part_fits_the_middle_is_taken() -> None:
    assert samples._box(1000, 10, np.random.default_rng(0)) == (495.0, 0.0, 505.0, 10.0)


def test_texts_are_fixed_by_their_seed_and_all_different() -> None:
    texts = make_texts(50, 20, seed=1)
    assert texts == make_texts(50, 20, seed=1)
    assert len(set(texts) | set(make_texts(50, 20, seed=2))) == 100


def test_lengths_of_texts_are_lognormal_around_their_median() -> None:
    logs = np.log([len(text.split()) for text in make_texts(2000, 200, seed=1)])
    assert np.median(logs) == pytest.approx(np.log(200), abs=0.06)
    assert logs.std() == pytest.approx(samples.SPREAD, rel=0.06)
    assert abs(np.mean(((logs - logs.mean()) / logs.std()) ** 3)) < 0.2, "of the logarithms, no skew"


def test_a_text_has_at_least_a_word() -> None:
    assert all(text.split() for text in make_texts(300, 1, seed=1))


def test_words_come_by_zipf_s_law() -> None:
    """The word of rank r comes as often as 1 / (r + 2.7)."""
    words = b" ".join(make_texts(2000, 200, seed=1)).replace(b",", b"").replace(b".", b"").split()
    drawn = np.searchsorted(
        np.cumsum(np.sort(np.unique(words, return_counts=True)[1])[::-1]), 0.5 * len(words)
    )
    weights = np.cumsum(1 / (np.arange(samples.WORDS) + 2.7))
    expected = np.searchsorted(weights, 0.5 * weights[-1])
    assert drawn <= expected, "spelt alike, words of different ranks are one"
    assert drawn > expected / 8
    assert samples.WORDS / 8 < len(set(words)) <= samples.WORDS


def test_a_text_is_cut_into_words_their_pieces_and_marks() -> None:
    """And its ids are these in every process, whatever it hashes strings with."""
    tokens = ["the", "loader", "s", ",", "naïve", "."]
    ids = [1 + zlib.crc32(token.encode()) % 32767 for token in tokens]
    assert tokenise("the  loaders,\nnaïve.".encode(), 100).tolist() == ids
    assert ids[0] == 26226


def test_tokens_are_cut_to_the_longest_and_none_is_padding() -> None:
    texts = make_texts(100, 50, seed=1)
    for text, count in zip(texts, token_counts(texts, 60), strict=True):
        ids = tokenise(text, 60)
        assert (ids.dtype, ids.dim(), len(ids)) == (torch.int64, 1, count)
        assert 1 <= count <= 60
        assert samples.PADDING < int(ids.min()) <= int(ids.max()) < samples.VOCABULARY
        assert torch.equal(ids, tokenise(text, 10**6)[:60])
    assert 60 in token_counts(texts, 60)
