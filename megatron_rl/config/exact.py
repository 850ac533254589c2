"""Settings as the decimal numbers that they were written as."""

from __future__ import annotations

from fractions import Fraction


def as_written(value: float) -> Fraction:
    """Return the decimal number of a setting, which a float only comes near: 100 x 1.1 is above 110
    in floating point, and would be rounded up to 111.
    """
    return Fraction(repr(value))
