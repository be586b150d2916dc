#!/usr/bin/env python3
"""Makes tests/data/golden_shuffle.h: NumPy's own shuffles, and sample layouts and blends computed
from Megatron's rules (documents, samples, shuffle, separate last epoch) in the most literal way.

    python3 tools/golden_shuffle.py > tests/data/golden_shuffle.h
"""
import numpy

SHUFFLES = [(0, 10), (42, 10), (1234, 10), (0, 1000), (1234, 1000), (4294967295, 1000), (7, 1), (7, 2)]

# name, document lengths, seq, wanted samples (0: one epoch), seed
LAYOUTS = [
    ("one_epoch", [5, 3, 9, 1, 4, 12, 2], 4, 0, 1234),
    ("part_of_one", [5, 3, 9, 1, 4, 12, 2], 4, 3, 1234),
    ("separate_last", [5, 3, 9, 1, 4, 12, 2], 4, 20, 1234),  # 3 epochs, 3 of 8 samples needed
    ("joined_last", [5, 3, 9, 1, 4, 12, 2], 4, 25, 1234),  # 3 epochs, 8 of 8 needed
    ("threshold", [5, 3, 9, 1, 4, 12, 2], 4, 23, 1234),  # 6 of 8 needed: not below 80%, rounded down
    ("one_token_more", [5, 3, 9, 1, 4, 12, 2], 4, 9, 1234),  # 36 tokens, 37 are needed
    ("exact_fit", [8, 9], 4, 4, 99),
    ("one_document", [23], 5, 11, 5),
    ("empty_documents", [0, 4, 0, 0, 7, 0], 3, 8, 3),
    ("long_samples", [2, 1, 3, 1, 1, 2, 4, 1, 1, 3, 2, 2], 10, 9, 17),
]

BLENDS = [([0.7, 0.3], 40), ([1 / 3, 1 / 3, 1 / 3], 20), ([0.05, 0.9, 0.05], 50)]
EXHAUSTIVE = [[3, 10, 1], [5, 5]]


def layout(lengths, seq, wanted, seed):
    total, docs = sum(lengths), len(lengths)
    epochs = 1
    while wanted and epochs * total < wanted * seq + 1:
        epochs += 1
    separate, before = False, 0
    if epochs > 1:
        before = ((epochs - 1) * total - 1) // seq
        separate = wanted - before < int(0.80 * ((total - 1) // seq))
    rng = numpy.random.RandomState(seed)

    def tiled(times):
        order = numpy.tile(numpy.arange(docs, dtype=numpy.int32), times)
        rng.shuffle(order)
        return order

    order = numpy.concatenate((tiled(epochs - 1), tiled(1))) if separate else tiled(epochs)
    n = (epochs * total - 1) // seq
    stream = [(place, i) for place, d in enumerate(order) for i in range(lengths[d])]
    starts = [stream[j * seq] for j in range(n)]
    if separate:
        first, last = numpy.arange(before), numpy.arange(before, n)
        rng.shuffle(first)
        rng.shuffle(last)
        shuffle = numpy.concatenate((first, last))
    else:
        shuffle = numpy.arange(n)
        rng.shuffle(shuffle)
    return epochs, separate, order, starts, shuffle


def blend(weights, n):
    used, out = [0] * len(weights), []
    for i in range(n):
        behind = [w * max(i, 1.0) - u for w, u in zip(weights, used)]
        k = behind.index(max(behind))
        out.append((k, used[k]))
        used[k] += 1
    return out


def exhaustive(counts):
    total = sum(counts)
    used, out = [0] * len(counts), []
    for i in range(total):
        alive = [k for k in range(len(counts)) if used[k] < counts[k]]
        k = max(alive, key=lambda k: (counts[k] / total * max(i, 1.0) - used[k], -k))
        out.append((k, used[k]))
        used[k] += 1
    return out


def c_array(kind, name, values):
    lines, line = [], "   "
    for v in values:
        word = f" {v},"
        if len(line) + len(word) > 96:
            lines.append(line)
            line = "   "
        line += word
    print(f"static const {kind} {name}[] = {{")
    print("\n".join(lines + [line]))
    print("};")


def main():
    print(f"/* Made by tools/golden_shuffle.py with NumPy {numpy.__version__}; do not edit. */")
    print("/* clang-format off */")
    for k, (seed, n) in enumerate(SHUFFLES):
        a = numpy.arange(n)
        numpy.random.RandomState(seed).shuffle(a)
        c_array("uint32_t", f"shuffle_{k}", a)
    print("static const struct golden_shuffle { uint32_t seed; int64_t n; const uint32_t *want; }")
    print("golden_shuffles[] = {")
    for k, (seed, n) in enumerate(SHUFFLES):
        print(f"    {{{seed}u, {n}, shuffle_{k}}},")
    print("};\n")

    for name, lengths, seq, wanted, seed in LAYOUTS:
        epochs, separate, order, starts, shuffle = layout(lengths, seq, wanted, seed)
        c_array("int32_t", f"lengths_{name}", lengths)
        c_array("uint32_t", f"order_{name}", order)
        c_array("int64_t", f"starts_{name}", [x for s in starts for x in s])
        c_array("uint32_t", f"samples_{name}", shuffle)
    print("static const struct golden_layout {")
    print("    const char *name; const int32_t *lengths; int docs; int64_t seq, wanted; uint32_t seed;")
    print("    int64_t epochs; int separate; int64_t n; const uint32_t *order; const int64_t *starts;")
    print("    const uint32_t *shuffle;")
    print("} golden_layouts[] = {")
    for name, lengths, seq, wanted, seed in LAYOUTS:
        epochs, separate, order, starts, shuffle = layout(lengths, seq, wanted, seed)
        print(f'    {{"{name}", lengths_{name}, {len(lengths)}, {seq}, {wanted}, {seed}u, {epochs}, '
              f"{int(separate)}, {len(starts)},\n     order_{name}, starts_{name}, samples_{name}}},")
    print("};\n")

    rows = []
    for k, (weights, n) in enumerate(BLENDS):
        c_array("double", f"weights_{k}", [repr(w) for w in weights])
        c_array("int", f"blend_{k}", [x for pair in blend(weights, n) for x in pair])
        rows.append(f"    {{weights_{k}, NULL, {len(weights)}, {n}, blend_{k}}},")
    for k, counts in enumerate(EXHAUSTIVE):
        c_array("double", f"sizes_{k}", [repr(c / sum(counts)) for c in counts])
        c_array("int64_t", f"counts_{k}", counts)
        c_array("int", f"exhaust_{k}", [x for pair in exhaustive(counts) for x in pair])
        rows.append(f"    {{sizes_{k}, counts_{k}, {len(counts)}, {sum(counts)}, exhaust_{k}}},")
    print("static const struct golden_blend {")
    print("    const double *weights; const int64_t *counts; int k; int64_t n; const int *want;")
    print("} golden_blends[] = {")
    print("\n".join(rows))
    print("};")


if __name__ == "__main__":
    main()
