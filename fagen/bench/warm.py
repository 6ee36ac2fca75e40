"""Caches filled before anything is timed: those who compile do so in processes of their own, at once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from typing import TypeVar

from fagen.bench.cells import Cell
from fagen.bench.measure import Tell

Job = TypeVar("Job")


def workers(asked: int | None) -> int:
    """Processes that compile: as asked, else one a core, at most eight: each holds a context of the GPU."""
    return asked if asked is not None else min(os.cpu_count() or 1, 8)


def warm(
    jobs: Sequence[Job],
    count: int,
    tell: Tell,
    work: Callable[[Job], object],
    pool: Executor | None = None,
) -> None:
    """Do each job once in one of ``count`` processes, or by ``pool``.

    What fails there will fail again, and be told, when it is timed.
    """
    if count < 2 or len(jobs) < 2:
        return
    spawning = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU of its parent's
    with pool or ProcessPoolExecutor(min(count, len(jobs)), mp_context=spawning) as pool:
        waiting = [pool.submit(work, job) for job in jobs]
        for done, each in enumerate(as_completed(waiting)):
            each.exception()
            tell("compile", done + 1, len(jobs))


def call_once(job: tuple[str, Cell]) -> None:
    """Prepare a contender for a cell and call it, so that what it compiles is in its cache."""
    import torch

    from fagen.bench.contenders import Inputs, directed
    from fagen.bench.lineup import contender_of

    name, cell = job
    torch.set_num_threads(1)
    contender = contender_of(name)
    if contender.refusal(cell):
        return
    inputs = Inputs(cell, torch.device("cuda", torch.cuda.current_device()))
    ready = directed(contender.prepare(cell, inputs), inputs)
    with ready.around():
        ready.call()
    torch.cuda.synchronize()
