"""Step time of a small but realistic transformer: whether what a library adds is still to be seen there.

python benchmarks/transformer_step.py
python benchmarks/transformer_step.py --ranks 1 --precision no
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
    parser.add_argument("--precision", nargs="+", default=["no"], choices=["no", "bf16"])
    parser.add_argument("--contenders", nargs="+", default=list(DISTRIBUTIONS), choices=list(DISTRIBUTIONS))
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn")
    add_common_options(parser, blocks=21)
    args = parser.parse_args()

    load, contenders, rows = os.getloadavg()[0], installed(args.contenders), []
    for ranks, precision in itertools.product(args.ranks, args.precision):
        case = {"ranks": ranks, "precision": precision, "model": "transformer"}
        made = measure_steps(case, contenders, steps=args.steps, blocks=args.blocks)
        print_steps(f"transformer, ranks {ranks}, precision {precision}", made)
        rows += made
    if not args.no_results:
        print(f"\nwritten: {write_results('transformer_step', rows, load)}")


if __name__ == "__main__":
    main()
