#!/usr/bin/env python3
"""Loss curves of several runs as one SVG. Nothing but Python is needed.

  plot_runs.py OUT.svg LABEL=RUN[,RUN...] [LABEL=RUN...]      RUN is a run folder with metrics.jsonl

Runs of one label (seeds) are drawn thin, their mean thick; the training loss is averaged over 25 steps. Prints, for
each label, the mean training loss over the last 50 steps, the validation loss, and the largest composite gain of the
mixing matrices ("mhc gain" in metrics.jsonl) over all steps and layers.
"""
import html
import json
import os
import sys

COLORS = ("#1f6fb2", "#c8501e", "#3a8f3a", "#7a4fa3")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 56, 16, 18, 44
WINDOW = 25


def read_run(folder):
    """(losses by step, {step: validation loss}, largest gain or None)"""
    losses, valid, gain = [], {}, None
    with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as f:
        for line in f:
            row = json.loads(line)
            if "val_loss" in row:
                valid[row["step"]] = row["val_loss"]
            elif "loss" in row and "event" not in row:
                losses.append(row["loss"])
                gains = [v for k, v in row.get("extra", {}).items() if k.startswith("mhc gain")]
                gain = max(gains + ([gain] if gain is not None else []), default=None)
    return losses, valid, gain


def smooth(values):
    return [sum(values[max(0, i - WINDOW + 1) : i + 1]) / (i + 1 - max(0, i - WINDOW + 1)) for i in range(len(values))]


def mean(rows):
    return [sum(column) / len(column) for column in zip(*rows)]


def ticks(low, high, count=6):
    step = next(s for e in range(-3, 9) for s in (10**e, 2 * 10**e, 5 * 10**e) if (high - low) / s <= count)
    first = -(-low // step)
    return [round((first + i) * step, 6) for i in range(int((high - low) / step) + 1) if (first + i) * step <= high]


def draw(groups):
    curves = {label: [smooth(run[0]) for run in runs] for label, runs in groups.items()}
    steps = max(len(c) for group in curves.values() for c in group)
    low = min(min(c) for group in curves.values() for c in group)
    high = max(c[min(WINDOW, len(c) - 1)] for group in curves.values() for c in group)  # the first steps fall too far
    low, high = low - 0.05 * (high - low), high
    x = lambda step: LEFT + (WIDTH - LEFT - RIGHT) * step / steps
    y = lambda v: TOP + (HEIGHT - TOP - BOTTOM) * (high - min(v, high)) / (high - low)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
           'font-family="sans-serif" font-size="12">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>']
    for v in ticks(low, high):
        out.append(f'<path d="M{LEFT} {y(v):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/><text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}</text>')
    for v in ticks(0, steps):
        out.append(f'<text x="{x(v):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{v:g}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">step (training loss, mean of {WINDOW} steps; dots: validation)</text>')

    def path(values, color, width, opacity):
        every = max(1, len(values) // 200)
        points = "L".join(f"{x(i + 1):.1f} {y(v):.1f}" for i, v in enumerate(values) if i % every == 0 or i + 1 == len(values))
        out.append(f'<path d="M{points}" fill="none" stroke="{color}" stroke-width="{width}" opacity="{opacity}"/>')

    for k, (label, runs) in enumerate(groups.items()):
        color = COLORS[k % len(COLORS)]
        for curve in curves[label]:
            path(curve, color, 0.7, 0.45)
        path(mean(curves[label]), color, 2, 1)
        for step in sorted(set.intersection(*(set(run[1]) for run in runs))):
            v = sum(run[1][step] for run in runs) / len(runs)
            if v <= high:
                out.append(f'<circle cx="{x(step):.1f}" cy="{y(v):.2f}" r="3.5" fill="{color}"/>')
        top = TOP + 16 + 18 * k
        out.append(f'<path d="M{WIDTH - 230} {top}h26" stroke="{color}" stroke-width="2"/><text x="{WIDTH - 198}" y="{top + 4}">{html.escape(label)}</text>')
    return "\n".join(out + ["</svg>", ""])


def main():
    if len(sys.argv) < 3 or not all("=" in arg for arg in sys.argv[2:]):
        sys.exit(__doc__)
    groups = {}
    for arg in sys.argv[2:]:
        label, folders = arg.rsplit("=", 1)
        groups[label] = [read_run(folder) for folder in folders.split(",")]
    with open(sys.argv[1], "w", encoding="utf-8") as f:
        f.write(draw(groups))
    for label, runs in groups.items():
        last = [sum(run[0][-50:]) / 50 for run in runs]
        valid = [run[1][max(run[1])] for run in runs]
        gains = [run[2] for run in runs if run[2] is not None]
        print(f"{label}: train {sum(last) / len(last):.4f} ({', '.join(f'{v:.4f}' for v in last)}), "
              f"validation {sum(valid) / len(valid):.4f} ({', '.join(f'{v:.4f}' for v in valid)})"
              + (f", largest composite gain {max(gains):.4f}" if gains else ""))


if __name__ == "__main__":
    main()
