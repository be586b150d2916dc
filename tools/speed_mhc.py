#!/usr/bin/env python3
"""What manifold hyper-connections cost: a training step with and without them, in alternating turns.

  speed_mhc.py --braid build/braid            configs/demo.ini with 4 streams and with the plain residual
  speed_mhc.py --trace                        also where the time of the joints goes

Each turn is a process of its own (`braid bench train`, random tokens) and reports the median step. The median
over turns counts. A pair of turns during which other processes had more than 3 % of the processors is left out and
repeated (Linux: /proc/stat), for --minutes at most. --cpu measures the processor time of one thread instead,
which other processes disturb less.
"""
import argparse
import collections
import json
import os
import re
import resource
import statistics
import subprocess
import tempfile
import time


class Others:
    """The share of all processors that processes other than our own took since the start."""

    def __init__(self):
        self.begin = self.now()

    @staticmethod
    def now():
        own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        try:
            with open("/proc/stat", encoding="ascii") as f:
                ticks = [int(x) for x in f.readline().split()[1:9]]
        except OSError:
            return time.monotonic(), own, own
        idle = ticks[3] + ticks[4]
        return time.monotonic(), (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK"), own

    def share(self):
        seconds, busy, own = (b - a for a, b in zip(self.begin, self.now()))
        return max(0.0, busy - own) / seconds / os.cpu_count()


def bench(a, streams, steps, *more):
    args = [a.braid, "bench", "train", a.config, f"--model.mhc_streams={streams}", f"--train.steps={steps}", "--train.warmup=1", *more]
    args.append(f"--run.threads={1 if a.cpu else a.threads}")
    out = subprocess.run(args, check=True, stdout=subprocess.PIPE, text=True).stdout
    return float(re.search(r"ms_per_step: ([\d.]+)", out).group(1))


def processor_ms(a, streams):
    """Of one step: a long run less a short one, so that the start does not count."""

    def used(steps):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        bench(a, streams, steps)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    short = 4
    return (used(a.steps + short) - used(short)) / a.steps * 1e3


def joints(a, streams):
    """Milliseconds of a step by kind of node of the joints: medians over steps of a traced run, summed over layers."""
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "trace.json")
        bench(a, streams, a.steps, f"--plan.trace={path}", f"--plan.trace_steps={a.steps}")
        with open(path, encoding="utf-8") as f:
            events = json.load(f)
    events = events["traceEvents"] if isinstance(events, dict) else events
    spans = collections.defaultdict(list)
    for x in events:
        if x.get("ph") == "X" and ".joint." in x["name"]:
            spans[x["name"]].append(x["dur"])
    total = collections.Counter()
    for name, times in spans.items():
        total[name.split(".joint.")[1]] += statistics.median(times) * 1e-3
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--braid", default="build/braid")
    parser.add_argument("--config", default="configs/demo.ini")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=20, help="how long to wait for undisturbed turns")
    parser.add_argument("--cpu", action="store_true", help="processor time of one thread")
    parser.add_argument("--trace", action="store_true", help="time of the joints by node")
    a = parser.parse_args()
    turns, left_out, end = {0: [], a.streams: []}, 0, time.monotonic() + 60 * a.minutes
    while len(turns[0]) < a.rounds and time.monotonic() < end:
        others = Others()
        time.sleep(0.5)
        if others.share() > 0.03 and not a.cpu:
            continue
        others = Others()
        pair = [processor_ms(a, streams) if a.cpu else bench(a, streams, a.steps) for streams in turns]
        if others.share() > 0.03 and not a.cpu:
            left_out += 1
            continue
        for times, ms in zip(turns.values(), pair):
            times.append(ms)
    if not turns[0]:
        raise SystemExit(f"no undisturbed turn in {a.minutes} minutes ({left_out} left out): other processes are busy; try --cpu")
    what = "processor ms a step, one thread" if a.cpu else f"ms a step, {a.threads} threads"
    for streams, times in turns.items():
        name = f"{streams} streams" if streams else "plain residual"
        print(f"{name:15} {statistics.median(times):8.2f} {what} (median of {len(times)} turns, {min(times):.2f} - {max(times):.2f})")
    plain, mhc = (statistics.median(turns[s]) for s in turns)
    print(f"{left_out} disturbed pairs left out" if left_out else "no pair disturbed")
    print(f"added {100 * (mhc / plain - 1):.1f} % (best turns {100 * (min(turns[a.streams]) / min(turns[0]) - 1):.1f} %)")
    if a.trace:
        for streams in turns:
            times = joints(a, streams)
            print(f"joints, {streams or 1} stream(s): {sum(times.values()):.2f} ms of a step; "
                  + ", ".join(f"{name} {ms:.2f}" for name, ms in times.most_common()))  # fmt: skip


if __name__ == "__main__":
    main()
