"""Every error a user meets, as one sentence: what failed, in which call, on which values, and what works."""

from collections.abc import Mapping


def _shown(value: object) -> str:
    """Write a value as a message shows it: long whole numbers in groups of three digits."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}"
    return str(value)


def pip_install(extra: str, upgrade: bool = False) -> str:
    """How to get what a part of this package needs, which is on no index."""
    return f"pip install {'--upgrade ' if upgrade else ''}'.[{extra}]' in a checkout of fagen"


class FagenError(Exception):
    """The base of all errors of this package; ``str()`` is ``sentence`` and, below it, ``details``.

    The sentence is ``call: what (name = value, ...); works``, each part left out where it is not given.

    what     what failed, in the user's own names and numbers
    call     the call as the user wrote it, such as ``attention(q, k, v)``
    values   names and values the failure depends on, where ``what`` does not name them already
    works    what would work instead, or how to mend it
    details  more lines for whoever looks closer (a compiler's log, a fiber's stack), no part of the sentence
    """

    def __init__(
        self,
        what: str,
        *,
        call: str = "",
        values: Mapping[str, object] | None = None,
        works: str = "",
        details: str = "",
    ) -> None:
        named = ", ".join(f"{name} = {_shown(value)}" for name, value in (values or {}).items())
        head = f"{call}: {what}" if call else what
        middle = f" ({named})" if named else ""
        self.sentence = head + middle + (f"; {works}" if works else "")
        self.what = what
        self.call = call
        self.values = dict(values or {})
        self.works = works
        self.details = details
        super().__init__(self.sentence + (f"\n{details}" if details else ""))


class UsageError(FagenError, ValueError):
    """A value, an axis, a name or a shape the language gives no meaning to."""


class DtypeError(FagenError, TypeError):
    """A type, dtype or device, or a mix of them, the language gives no meaning to."""


class PlanError(FagenError, ValueError):
    """No plan fits: what was asked for is known to be impossible before any compiler runs."""


class ToolchainError(FagenError, RuntimeError):
    """A compiler is missing, or does not know the device."""


class BuildError(FagenError, RuntimeError):
    """A compiler was given a kernel and failed; ``details`` holds its log."""


class LaunchError(FagenError, RuntimeError):
    """A device refused to load or to run a kernel."""


class EmulatorFinding(FagenError, RuntimeError):
    """The emulator saw a kernel break a rule of the machine: a deadlock, a race, an access out of bounds."""
