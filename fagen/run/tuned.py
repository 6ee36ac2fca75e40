"""What measurements on a GPU said of a problem's plans, kept beside the builds: one value a problem and GPU.

It is kept for one version of this package: another may rank other plans.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fagen.run.cache import Parts, index_get, index_put, kept, package_digest


@dataclass(frozen=True)
class Tuned:
    """The fastest of the plans that were measured.

    name       of the kernel
    gpu        the device's full name
    finalist   its rank among the plans by the model; None where it is the one that is taken without measuring
    tiles      what it is called in `explain`
    gain       how many times as fast it is as the plan taken without measuring
    measured   how many plans were
    """

    name: str
    gpu: str
    finalist: int | None
    tiles: str
    gain: float
    measured: int


def recall(parts: Parts) -> Mapping[str, Tuned]:
    """What is kept for a problem, by the name of the GPU."""
    value = index_get(_keyed(parts), "tuned") or {"of": {}}
    return {gpu: Tuned(**each) for gpu, each in value["of"].items()}


def remember(parts: Parts, tuned: Tuned) -> None:
    """Keep a result, in place of any other for the problem and GPU."""
    _put(parts, {**recall(parts), tuned.gpu: tuned})


def _put(parts: Parts, of: Mapping[str, Tuned]) -> None:
    value = {"package": package_digest(), "of": {gpu: asdict(each) for gpu, each in of.items()}}
    index_put(_keyed(parts), value, "tuned")


def forget(parts: Parts, gpu: str) -> None:
    """Keep nothing of a problem on a GPU any more."""
    known = recall(parts)
    if gpu in known:
        _put(parts, {name: each for name, each in known.items() if name != gpu})


def every() -> list[Tuned]:
    """All results that this version of the package uses."""
    values = [value for value in kept("tuned") if value["package"] == package_digest()]
    found = [Tuned(**each) for value in values for each in value["of"].values()]
    return sorted(found, key=lambda each: (each.gpu, each.name))


def _keyed(parts: Parts) -> Parts:
    return {"kind": "tuned", **parts}
