"""Rotary position embedding: its frequencies, and how published models stretch them past their original length.

One class per method; None: not stretched. With base b and n rotated dimensions, pair i rotates by b^(-2i/n) per
position.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from jrl.types import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearRope:
    """Position interpolation (2306.15595): every frequency divided by `factor`."""

    factor: float  # times the original length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1: frequencies of waves longer than original / low_freq_factor are divided by `factor`, those of waves
    shorter than original / high_freq_factor are unchanged, and between the two they are interpolated linearly in
    original / wavelength."""

    factor: float  # divides the frequency of long waves
    low_freq_factor: float  # waves longer than original_length / this are divided
    high_freq_factor: float  # waves shorter than original_length / this are unchanged
    original_length: int  # tokens the model was first trained at

    def __post_init__(self) -> None:
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"Llama3Rope.low_freq_factor = {self.low_freq_factor} must be below high_freq_factor = "
                f"{self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnRope:
    """YaRN (2309.00071), section 3: interpolated by parts, queries and keys scaled."""

    factor: float  # divides the frequencies of slow pairs
    original_length: int  # tokens the model was first trained at
    beta_fast: float = 32.0  # pairs that rotate more often than this within the original length are unchanged
    beta_slow: float = 1.0  # pairs that rotate less often are divided by `factor`
    attention_factor: float | None = None  # of queries and keys; None: 0.1 ln(factor) + 1
    truncate: bool = True  # the bounds are rounded to whole pairs, as in the authors' code


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRope:
    """LongRoPE (2402.13753): each pair's frequency is divided by its own factor, and queries and keys are scaled. One
    list of factors is for sequences within the original length, one for longer ones; a run uses the same list for all
    its sequences: docs/decisions/longrope.md."""

    short: tuple[float, ...]  # a divisor for each pair, for sequences within the original length
    long: tuple[float, ...]  # the same for longer sequences
    original_length: int  # tokens the model was first trained at
    factor: float  # longest supported sequence / original_length
    attention_factor: float | None = None  # of queries and keys; None: sqrt(1 + ln(factor) / ln(original_length))
    longest: int | None = None  # tokens of the longest sequence that will be read. None: within the original length

    def __post_init__(self) -> None:
        if len(self.short) != len(self.long):
            raise ValueError(
                f"LongRope.short has {len(self.short)} numbers, LongRope.long {len(self.long)}; each needs one per pair"
            )

    @property
    def divisors(self) -> tuple[float, ...]:
        return self.short if self.longest is None or self.longest <= self.original_length else self.long


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProportionalRope:
    """The first pairs of a head rotate with the wavelengths of the full head, the others do not rotate, as
    in the full layers of Gemma 4. (`Decoder.rotary_dim` spreads all wavelengths over the entries that rotate.)"""

    share: float  # of the pairs
    factor: float = 1.0  # frequencies are divided by it


Stretch = LinearRope | Llama3Rope | YarnRope | LongRope | ProportionalRope


def frequencies(theta: float, half: int, dtype: jnp.dtype, stretch: Stretch | None = None) -> Array:
    """Returns the rotation of every pair per position, [half] radians.

    Args:
      theta: base of the wavelengths.
      stretch: None: the plain wavelengths.
    """
    plain = jnp.asarray(theta, dtype) ** (-jnp.arange(half, dtype=dtype) / half)
    if stretch is None:
        return plain
    if isinstance(stretch, LinearRope):
        return plain / stretch.factor
    if isinstance(stretch, LongRope):
        return plain / jnp.asarray(stretch.divisors, dtype)
    if isinstance(stretch, ProportionalRope):
        return jnp.where(jnp.arange(half) < int(stretch.share * half), plain, 0) / stretch.factor
    if isinstance(stretch, Llama3Rope):
        rotations = stretch.original_length * plain / (2 * math.pi)  # within the original length
        undivided = (rotations - stretch.low_freq_factor) / (stretch.high_freq_factor - stretch.low_freq_factor)
        undivided = jnp.clip(undivided, 0, 1)
        return undivided * plain + (1 - undivided) * plain / stretch.factor
    low, high = (_pair(rotations, theta, half, stretch) for rotations in (stretch.beta_fast, stretch.beta_slow))
    if stretch.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    high = high + 0.001 if low == high else high
    divided = jnp.clip((jnp.arange(half, dtype=dtype) - low) / (high - low), 0, 1)
    return divided * plain / stretch.factor + (1 - divided) * plain


def amplitude(stretch: Stretch | None) -> float:
    """Returns the factor that rotated queries and keys are multiplied by."""
    if not isinstance(stretch, YarnRope | LongRope):
        return 1.0
    if stretch.attention_factor is not None:
        return stretch.attention_factor
    if isinstance(stretch, LongRope):
        return math.sqrt(1 + math.log(max(stretch.factor, 1)) / math.log(stretch.original_length))
    return 0.1 * math.log(stretch.factor) + 1 if stretch.factor > 1 else 1.0


def _pair(rotations: float, theta: float, half: int, stretch: YarnRope) -> float:
    """Returns the (fractional) index of the pair that rotates `rotations` times within the original length."""
    return half * math.log(stretch.original_length / (rotations * 2 * math.pi)) / math.log(theta)


def cos_sin(positions: Array, frequency: Array, scale: float = 1.0) -> tuple[Array, Array]:
    """Returns (cos, sin) of the angle by which every pair rotates, both [B, L, 1, half] in the dtype of `frequency`.

    Args:
      positions: [B, L] int32.
      frequency: [half] radians per position.
      scale: factor of the rotated entries.
    """
    angle = positions[:, :, None, None].astype(frequency.dtype) * frequency[None, None, None, :]
    with set_xla_metadata(inlineable="false"):  # else XLA fuses them into the layers, which compute them for every head
        cos, sin = _cos_and_sin(angle)
    return (cos, sin) if scale == 1.0 else (cos * scale, sin * scale)


@jax.jit
def _cos_and_sin(angle: Array) -> tuple[Array, Array]:
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Returns `x` with rotary position embedding.

    Args:
      x: [B, L, H, K]. The two halves of the first 2 * half entries are real and imaginary parts; the rest is unchanged.
      cos, sin: from `cos_sin`, computed once for all layers.

    Source: RoFormer (2104.09864), in the half-split form that published Llama weights use.
    """
    half = cos.shape[-1]
    rotated, rest = (x, None) if 2 * half == x.shape[-1] else (x[..., : 2 * half], x[..., 2 * half :])
    real, imaginary = jnp.split(rotated.astype(cos.dtype), 2, axis=-1)
    out = jnp.concatenate([real * cos - imaginary * sin, imaginary * cos + real * sin], axis=-1).astype(x.dtype)
    return out if rest is None else jnp.concatenate([out, rest], axis=-1)
