#!/usr/bin/env python3
"""Check a run's TensorBoard files with TensorBoard's own reader.

    python tools/check_tensorboard.py RUN_FOLDER

Reads RUN/tb with tensorboard's event_accumulator and RUN/metrics.jsonl with json, and compares every
scalar, step by step, after applying start and resume records. Needs the tensorboard package.
"""
import json
import math
import sys

from tensorboard.backend.event_processing import event_accumulator

STEP_TAGS = {
    "loss": "lm loss",
    "lr": "learning-rate",
    "grad_norm": "grad-norm",
    "tokens_per_s": "tokens-per-second",
    "mfu": "mfu-percent",
}
EVAL_TAGS = {
    "val_loss": "lm loss validation",
    "ppl": "lm loss validation ppl",
    "bits_per_byte": "bits per byte validation",
}


def expected(path):
    """{tag: {step: value or None}} from metrics.jsonl; None stands for a value that was not finite."""
    want = {}
    for line in open(path, encoding="utf-8"):
        record = json.loads(line)
        step = record["step"]
        if record.get("event") in ("start", "resume"):
            keep = -1 if record["event"] == "start" else step
            want = {tag: {s: v for s, v in points.items() if s <= keep} for tag, points in want.items()}
        if "event" in record:
            continue
        values = {tag: record[key] for key, tag in {**STEP_TAGS, **EVAL_TAGS}.items() if key in record}
        values.update(record.get("extra", {}))
        for tag, value in values.items():
            want.setdefault(tag, {})[step] = value
    return {tag: points for tag, points in want.items() if points}


def same(got, want):
    if want is None:
        return not math.isfinite(got)
    return math.isclose(got, want, rel_tol=1e-3, abs_tol=1e-30)


def main(run):
    reader = event_accumulator.EventAccumulator(
        run + "/tb", size_guidance={event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0}
    )
    reader.Reload()
    want, wrong, count = expected(run + "/metrics.jsonl"), 0, 0
    tags = set(reader.Tags()["scalars"])
    for tag in sorted(tags ^ set(want)):
        print("only in", "TensorBoard:" if tag in tags else "metrics.jsonl:", tag)
        wrong += 1
    for tag in sorted(tags & set(want)):
        got = [(e.step, e.value) for e in reader.Scalars(tag)]
        if [step for step, _ in got] != sorted(want[tag]):
            print(f"{tag}: steps differ ({len(got)} read, {len(want[tag])} expected)")
            wrong += 1
            continue
        for step, value in got:
            count += 1
            if not same(value, want[tag][step]):
                print(f"{tag} at step {step}: {value}, expected {want[tag][step]}")
                wrong += 1
    for tag in reader.Tags()["tensors"]:
        text = reader.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        plugin = reader.SummaryMetadata(tag).plugin_data.plugin_name
        print(f"{plugin} {tag}: {len(text)} characters")
    print(f"{len(tags)} tags, {count} values compared, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
