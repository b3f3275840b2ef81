"""One process of a contender: builds what is timed, then runs it whenever the conductor says so.

    worker.py MODULE:FUNCTION CONTENDER OPTIONS

``FUNCTION(contender, options)`` returns two callables, the hand-written reference and the contender's. Each line on
standard input asks for a turn (``go``) or for the number of calls (``count``); each answer is a line of JSON.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import attrs
from measuring import Times


def _timed(function: Callable[[], Any]) -> Times:
    import torch.distributed as dist

    gc.collect()
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
    return Times.of(function)


def _calls(function: Callable[[], Any]) -> int:
    """Calls of Python and C functions: a measure of work in the interpreter that no other program disturbs."""
    count = 0

    def on_event(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # a collection calls finalizers, at a moment of its own choice
    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def main() -> None:
    """Build, say so, and answer until standard input ends."""
    where, contender, options = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    warnings.simplefilter("ignore")
    module, _, name = where.partition(":")
    reference, subject = getattr(importlib.import_module(module), name)(contender, json.loads(options))

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    gc.freeze()  # what the imports left behind would make collecting before each turn slow
    answer(ready=True)
    for turn, line in enumerate(sys.stdin):
        if line.strip() == "count":
            answer(reference=_calls(reference), contender=_calls(subject))
        elif turn % 2:  # whoever runs second finds warmer caches: take turns in that as well
            own, base = _timed(subject), _timed(reference)
            answer(reference=attrs.asdict(base), contender=attrs.asdict(own))
        else:
            base, own = _timed(reference), _timed(subject)
            answer(reference=attrs.asdict(base), contender=attrs.asdict(own))


if __name__ == "__main__":
    main()
