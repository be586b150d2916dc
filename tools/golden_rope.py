#!/usr/bin/env python3
"""Golden rotary frequencies for tests/ops/test_rope.c, from the published formulas in NumPy.

Usage: python3 tools/golden_rope.py > tests/ops/golden_rope.h
"""
import math

import numpy as np


def plain(dim, base):
    return 1.0 / np.power(float(base), np.arange(0, dim, 2, dtype=np.float64) / dim)


def llama3(dim, base, factor, low, high, length):
    """Blend by how many turns a pair makes over the original length."""
    freq = plain(dim, base)
    turns = length * freq / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return freq * (smooth + (1.0 - smooth) / factor)


def yarn(dim, base, factor, length, fast, slow):
    """Interpolated below, extrapolated above, a linear ramp over the pair index between."""
    def pair_with_turns(turns):
        # base^(2k/dim) * 2 pi * turns = length, solved for k
        return dim / 2 * math.log(length / (2 * math.pi * turns), base)

    first = max(math.floor(pair_with_turns(fast)), 0)
    last = min(math.ceil(pair_with_turns(slow)), dim - 1)
    if first == last:
        last += 0.001
    ramp = np.clip((np.arange(dim // 2) - first) / (last - first), 0.0, 1.0)
    freq = plain(dim, base)
    return ramp * (freq / factor) + (1.0 - ramp) * freq


def emit(name, values):
    print(f"static const double {name}[] = {{")
    for v in values:
        print(f"    {v!r},")
    print("};")


def numbers(array):
    return [float(v) for v in array]


print("/* Made by tools/golden_rope.py; do not edit. */")
print("#ifndef BRAID_TESTS_GOLDEN_ROPE_H\n#define BRAID_TESTS_GOLDEN_ROPE_H\n")
emit("golden_plain_32_10000", numbers(plain(32, 10000)))
emit("golden_llama3_64_500000_f8_8192", numbers(llama3(64, 500000, 8, 1, 4, 8192)))
emit("golden_yarn_64_10000_f40_4096", numbers(yarn(64, 10000, 40, 4096, 32, 1)))
emit("golden_yarn_32_1000000_f4_32768", numbers(yarn(32, 1000000, 4, 32768, 32, 1)))
print("\n#endif")
