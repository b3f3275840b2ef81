"""Time that a library adds to each step of a hand-written torch loop, on a model so small that little else is left.

    python benchmarks/step_overhead.py
    python benchmarks/step_overhead.py --ranks 1 --accumulation 1 --precision no --blocks 31

The row ``torch`` compares the hand-written loop with itself: what it shows is noise.
"""

from __future__ import annotations

import argparse
import itertools
import os

from conductor import DISTRIBUTIONS, installed
from measuring import add_common_options, write_results
from step_table import measure_steps, print_steps


def main() -> None:
    """Measure the cases that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4], help="micro-batches in a group")
    parser.add_argument("--precision", nargs="+", default=["no", "bf16"], choices=["no", "bf16"])
    parser.add_argument("--contenders", nargs="+", default=list(DISTRIBUTIONS), choices=list(DISTRIBUTIONS))
    parser.add_argument("--steps", type=int, default=100, help="steps in a turn, a multiple of every accumulation")
    parser.add_argument(
        "--launches",
        type=int,
        default=6,
        help="starts of the processes that the blocks are spread over: how memory happens to be laid out in a process "
        "makes one loop faster than another by tens of microseconds",
    )
    add_common_options(parser, blocks=42)
    args = parser.parse_args()

    load, contenders, rows = os.getloadavg()[0], installed(args.contenders), []
    for ranks, accumulation, precision in itertools.product(args.ranks, args.accumulation, args.precision):
        case = {"ranks": ranks, "accumulation": accumulation, "precision": precision, "model": "tiny"}
        made = measure_steps(case, contenders, steps=args.steps, blocks=args.blocks, launches=args.launches)
        print_steps(f"ranks {ranks}, accumulation {accumulation}, precision {precision}", made)
        rows += made
    if not args.no_results:
        print(f"\nwritten: {write_results('step_overhead', rows, load)}")


if __name__ == "__main__":
    main()
