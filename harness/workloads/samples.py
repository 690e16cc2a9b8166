"""Samples with the costs of real ones, made from a seed: pictures as JPEG files, texts of varied length."""

import io
import re
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harness.errors import Skip

try:
    from PIL import Image
except ImportError:  # a GPU image may have torch and no more; texts need none of it
    Image = None  # type: ignore[assignment]

# Ids of tokens lie below it; 0 is padding.
VOCABULARY = 1 << 15
PADDING = 0

QUALITY = 85  # of the JPEG files: about 3 bits a pixel, as small photographs have
SLOPE = 1.2
TEXTURES = 4
SPREAD = 0.7  # of the logarithm of a text's length
WORDS = 1 << 14  # distinct ones in the texts

# What RandomResizedCrop of torchvision takes, by default: shares of the area, and width to height.
AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
ATTEMPTS = 10

# Words in pieces of up to six letters, marks by themselves.
TOKEN = re.compile(r"\w{1,6}|[^\w\s]")


def make_jpegs(count: int, side: int, seed: int) -> list[bytes]:
    """`count` pictures of side x side pixels as JPEG files, all different.

    Their amplitudes fall with frequency as those of natural pictures do, by f^-1.2 (Tolhurst et al. 1992, Ophthalmic
    Physiol. Opt. 12, 229), so that a decoder has as many coefficients to work on as with photographs. Each is a mixture
    of cuts out of a few large textures. Skip without Pillow.
    """
    if Image is None:
        raise Skip("pictures need Pillow, and it is not installed; pip install pillow")
    rng = np.random.default_rng([seed, 0])
    textures = [_texture(2 * side, rng) for _ in range(TEXTURES)]
    files = []
    for _ in range(count):
        light, red, blue = (_cut(textures[rng.integers(TEXTURES)], side, rng) for _ in range(3))
        # Colours differ less than brightness does, and more smoothly to the eye.
        planes = (light + 0.3 * red, light, light + 0.3 * blue)
        pixels = np.clip(np.stack(planes, axis=-1) * 48 + rng.uniform(96, 160), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
        files.append(file.getvalue())
    return files


def make_texts(count: int, words: int, seed: int) -> list[bytes]:
    """`count` texts in UTF-8. Their lengths are lognormal around the median `words`, at least one word; the words come
    by Zipf's law."""
    rng = np.random.default_rng([seed, 1])
    vocabulary = _vocabulary(rng)
    weights = 1 / (np.arange(WORDS) + 2.7)
    sums = np.cumsum(weights)
    lengths = np.maximum(1, rng.lognormal(np.log(words), SPREAD, count).astype(int))
    texts = []
    for length in lengths:
        drawn = np.searchsorted(sums, rng.uniform(0, sums[-1], length))
        ends = np.array(["", ",", "."])[rng.choice(3, size=length, p=(0.86, 0.08, 0.06))]
        text = " ".join(vocabulary[at] + end for at, end in zip(drawn, ends, strict=True))
        texts.append(text.encode())
    return texts


def rng_of(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The random numbers of one sample in one epoch, the same in whichever process it is made."""
    return np.random.default_rng([seed, epoch, index])


def decode_jpeg(data: bytes, crop: int, rng: np.random.Generator) -> Tensor:
    """A random part of the picture at crop x crop pixels, mirrored half the time; uint8, shape (3, crop, crop)."""
    with Image.open(io.BytesIO(data)) as opened:
        picture = opened.convert("RGB")
    picture = picture.resize((crop, crop), Image.Resampling.BILINEAR, box=_box(*picture.size, rng))
    pixels = np.array(picture)
    if rng.random() < 0.5:
        pixels = pixels[:, ::-1]
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def tokenise(data: bytes, longest: int) -> Tensor:
    """Ids of the text's tokens, cut to `longest`; int64, shape (tokens,), each from 1 to VOCABULARY - 1.

    An id is a hash of its token, so that there is no table to load, and every process has the same ids.
    """
    tokens = TOKEN.findall(data.decode())[:longest]
    return torch.tensor(
        [1 + zlib.crc32(token.encode()) % (VOCABULARY - 1) for token in tokens], dtype=torch.int64
    )


def token_counts(texts: Sequence[bytes], longest: int) -> list[int]:
    """How many tokens `tokenise` makes of each."""
    return [min(longest, len(TOKEN.findall(text.decode()))) for text in texts]


def _texture(side: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Noise whose amplitudes fall as f^-SLOPE, mean 0 and deviation 1; shape (side, side)."""
    across = np.fft.rfftfreq(side)
    frequency = np.hypot(np.fft.fftfreq(side)[:, None], across[None, :])
    frequency[0, 0] = np.inf  # no mean
    shape = frequency.shape
    spectrum = (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)) / frequency**SLOPE
    noise = np.fft.irfft2(spectrum, s=(side, side))
    return np.asarray(noise / noise.std(), dtype=np.float32)


def _cut(texture: npt.NDArray[np.float32], side: int, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """A square out of it at a random place, turned or mirrored at random; shape (side, side)."""
    top, left = rng.integers(0, len(texture) - side, 2)
    square = texture[top : top + side, left : left + side]
    square = square.T if rng.random() < 0.5 else square
    return square[:: rng.choice((-1, 1)), :: rng.choice((-1, 1))]


def _vocabulary(rng: np.random.Generator) -> list[str]:
    """WORDS words, the more frequent ones shorter."""
    letters = np.array(list("etaoinshrdlcumwfgypbvkjxqz"))
    weights = 1 / (np.arange(len(letters)) + 3)
    lengths = np.minimum(14, 1 + rng.poisson(1 + np.log1p(np.arange(WORDS)) / 1.8))
    drawn = rng.choice(letters, size=int(lengths.sum()), p=weights / weights.sum())
    ends = np.cumsum(lengths)
    return ["".join(drawn[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def _box(width: int, height: int, rng: np.random.Generator) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a random part, found as torchvision's RandomResizedCrop does."""
    for _ in range(ATTEMPTS):
        area = width * height * rng.uniform(*AREA)
        aspect = np.exp(rng.uniform(*np.log(ASPECT)))
        wide, high = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left, top = rng.integers(0, width - wide + 1), rng.integers(0, height - high + 1)
            return float(left), float(top), float(left + wide), float(top + high)
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
