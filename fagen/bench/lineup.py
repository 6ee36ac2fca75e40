"""Who takes part: names on the command line as contenders."""

from __future__ import annotations

from collections.abc import Sequence

from fagen.bench.contenders import PEERS, SEPARATE, Contender, of_family
from fagen.bench.length import both
from fagen.errors import UsageError
from fagen.plan.arch import FAMILIES

PLANNERS_CHOICE = "fagen"
"""The name of fagen's own choice of a family."""


def own(names: Sequence[str]) -> tuple[Contender, ...]:
    """fagen's families by name; what the planner chooses where none is named."""
    for name in names:
        if name != PLANNERS_CHOICE and name not in FAMILIES:
            raise UsageError(
                f"--family: {name!r} is not known",
                works=f"there are {', '.join((PLANNERS_CHOICE, *FAMILIES))}",
            )
    return tuple(of_family(None if name == PLANNERS_CHOICE else name) for name in names or [PLANNERS_CHOICE])


def peers(names: Sequence[str]) -> tuple[Contender, ...]:
    """Peers by name; all where none is named."""
    known = {peer.name: peer for peer in PEERS}
    for name in names:
        if name not in known:
            raise UsageError(f"--peer: {name!r} is not known", works=f"there are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else PEERS


def contender_of(name: str) -> Contender:
    """Anybody by name."""
    others = {each.name: each for each in (*PEERS, SEPARATE, *both())}
    return others[name] if name in others else own([name])[0]
