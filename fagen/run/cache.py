"""What was built before: entries named by the content they were built from, and an index in front of them.

An entry is a folder of files with a record of their checksums. It is written under another name and renamed,
so a reader sees all of it or nothing; what does not match its record is removed and built again. One lock per
key, across threads and processes, lets the first caller build while the others wait for its entry.
"""

import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fagen.errors import BuildError
from fagen.paths import PACKAGE_DIR, templates_dir

_FORMAT = 1  # a change of the layout below makes all older entries unknown
_RECORD = "entry.json"
_PARTS = ("objects", "index", "tuned", "locks", "tmp")

Shelf = Literal["index", "tuned"]
"""Where a small value is kept: what can be found anew, or what took measurements."""

Parts = Mapping[str, Any]
"""What something is made of, as JSON can hold it: strings, numbers, lists and mappings by name."""


@dataclass(frozen=True)
class Entry:
    """One thing that was built: its files, whose bytes were checked, and what its maker noted about it.

    key     sha256 of what it was built from
    folder  where its files lie, for a loader that wants a path
    files   content by name
    notes   what the maker returned
    fresh   whether this call built it
    """

    key: str
    folder: Path
    files: Mapping[str, bytes]
    notes: Mapping[str, Any]
    fresh: bool


@dataclass(frozen=True)
class CacheStats:
    """How much a cache holds: ``entries`` builds and ``index_entries`` answers in ``total_bytes`` bytes."""

    folder: Path
    entries: int
    index_entries: int
    total_bytes: int


def cache_dir() -> Path:
    """Return the cache's folder: FAGEN_CACHE_DIR, else the user's own, such as ``~/.cache/fagen``."""
    if named := os.environ.get("FAGEN_CACHE_DIR"):
        return Path(named).absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("fagen"))


def cache_key(parts: Parts) -> str:
    """Return the sha256 of what something is made of: equal parts, in any order of names, equal key."""
    return hashlib.sha256(_canonical({"format": _FORMAT, "parts": parts})).hexdigest()


def load(parts: Parts) -> Entry | None:
    """Return the entry built from ``parts``, or None; a damaged one is removed with a warning."""
    return load_key(cache_key(parts))


def load_key(key: str) -> Entry | None:
    """Return the entry of a key, or None; a damaged one is removed with a warning."""
    folder = _object_dir(key)
    try:
        return _read_entry(folder, key)
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir():
            return None
        reason = "a file is missing"
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error)
    with _locked(key):  # another process may have mended it by now
        with suppress(OSError, ValueError, KeyError, TypeError):
            return _read_entry(folder, key)
        if _discard(folder):
            message = f"fagen cache: {folder} is damaged ({reason}) and was removed"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
    return None


def cached(parts: Parts, produce: Callable[[Path], Parts]) -> Entry:
    """Return the entry for ``parts``, building it if need be: once, however many threads and processes ask.

    parts    everything the result depends on, by content: text, flags, versions; never a path, time or label
    produce  is given an empty folder, writes the entry's files into it and returns notes JSON can hold

    What ``produce`` raises reaches the caller whose build it was, and nothing is kept; another that waits
    then tries for itself. Raises BuildError where the cache cannot be written.
    """
    if entry := load(parts):
        return entry
    key = cache_key(parts)
    with _locked(key):
        with suppress(OSError, ValueError, KeyError, TypeError):
            return _read_entry(_object_dir(key), key)
        return _produce(key, produce)


def index_get(parts: Parts, shelf: Shelf = "index") -> Any | None:
    """Return the value kept for ``parts``, or None; a damaged one is removed with a warning."""
    key = cache_key(parts)
    path = _index_path(key, shelf)
    try:
        return _read_record(path, key)["value"]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError) as error:
        path.unlink(missing_ok=True)
        message = f"fagen cache: {path} is damaged ({error}) and was removed"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return None


def index_put(parts: Parts, value: Any, shelf: Shelf = "index") -> None:
    """Keep a small value JSON can hold for ``parts``, in place of any other.

    Raises BuildError where the cache cannot be written.
    """
    key = cache_key(parts)
    path = _index_path(key, shelf)
    with _scratch() as folder, _writing():
        _write_record(folder / path.name, {"key": key, "value": value})
        path.parent.mkdir(parents=True, exist_ok=True)
        (folder / path.name).replace(path)


def kept(shelf: Shelf) -> list[Any]:
    """Return all values of a shelf that are not damaged."""
    found = []
    for path in sorted((cache_dir() / shelf).glob("*/*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append(_read_record(path, path.stem)["value"])
    return found


def cache_stats() -> CacheStats:
    """Count what the cache holds."""
    root = cache_dir()
    files = [path for part in _PARTS for path in (root / part).rglob("*")]
    sizes = 0
    for path in files:
        with suppress(FileNotFoundError):
            sizes += path.stat().st_size if path.is_file() else 0
    return CacheStats(
        folder=root,
        entries=sum(1 for _ in (root / "objects").glob("*/*/" + _RECORD)),
        index_entries=sum(1 for _ in (root / "index").glob("*/*.json")),
        total_bytes=sizes,
    )


def cache_clear() -> CacheStats:
    """Remove what this package keeps in the cache's folder, and nothing else there; return what it held."""
    held = cache_stats()
    for part in _PARTS:
        shutil.rmtree(held.folder / part, ignore_errors=True)
    return held


@functools.cache
def package_digest() -> str:
    """Return the sha256 over the content of the package's modules and of all templates.

    Computed once a process: one whose files are edited while it runs goes on with the code it has loaded,
    and must not leave answers under the name of the new files.
    """
    digest = hashlib.sha256()
    modules = ((name, path) for name, path in _walk(PACKAGE_DIR, "fagen") if name.endswith(".py"))
    templates = (pair for pair in _walk(templates_dir(), "templates") if not pair[0].endswith(".pyc"))
    for name, path in sorted([*modules, *templates]):
        with open(path, "rb") as file:
            content = file.read()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _walk(folder: Path | str, name: str) -> Iterator[tuple[str, str]]:
    """Yield (name, path) of each file below a folder."""
    with suppress(FileNotFoundError), os.scandir(folder) as listing:
        for item in listing:
            if item.is_dir():
                yield from _walk(item.path, f"{name}/{item.name}")
            else:
                yield f"{name}/{item.name}", item.path


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", "surrogatepass"
    )


def _object_dir(key: str) -> Path:
    return cache_dir() / "objects" / key[:2] / key


def _index_path(key: str, shelf: Shelf) -> Path:
    return cache_dir() / shelf / key[:2] / f"{key}.json"


def _write_record(path: Path, body: Parts) -> None:
    """Write a record and, before it, its own checksum."""
    content = _canonical(body)
    path.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def _read_record(path: Path, key: str) -> dict[str, Any]:
    """Read a record; one that is torn, or was written for another key, raises ValueError."""
    checksum, _, content = path.read_bytes().partition(b"\n")
    if hashlib.sha256(content).hexdigest().encode() != checksum:
        raise ValueError(f"{path.name} does not match its checksum")
    body: dict[str, Any] = json.loads(content)
    if body["key"] != key:
        raise ValueError(f"{path.name} belongs to another key")
    return body


def _read_entry(folder: Path, key: str, fresh: bool = False) -> Entry:
    """Read an entry and check each of its files; raises ValueError or FileNotFoundError."""
    body = _read_record(folder / _RECORD, key)
    files = {}
    for name, checksum in body["files"].items():
        files[name] = (folder / name).read_bytes()
        if hashlib.sha256(files[name]).hexdigest() != checksum:
            raise ValueError(f"{name} does not match its checksum")
    return Entry(key, folder, files, body["notes"], fresh)


def _produce(key: str, produce: Callable[[Path], Parts]) -> Entry:
    """Build an entry in a scratch folder and move it into place."""
    final = _object_dir(key)
    with _scratch() as scratch:
        made = scratch / "made"
        made.mkdir()
        try:
            notes = produce(made)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise unwritable(error.strerror) from error
        files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(made.iterdir())}
        with _writing():
            _write_record(made / _RECORD, {"key": key, "files": files, "notes": notes})
            final.parent.mkdir(parents=True, exist_ok=True)
        _discard(final)  # no reader could use what is there, or we would not build
        with suppress(OSError):  # without a lock (a file system that has none) another may have been first
            made.rename(final)
    return _read_entry(final, key, fresh=True)


def _discard(folder: Path) -> bool:
    """Remove a folder so that no reader meets half of it; return whether it was there."""
    with _scratch() as scratch, suppress(FileNotFoundError):
        folder.rename(scratch / "discarded")
        return True
    return False


def _made(folder: Path) -> Path:
    """Make a folder of the cache; raises BuildError where that is not possible."""
    with _writing():
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def _writing() -> Iterator[None]:
    """Raise BuildError where the file system refuses what is written within."""
    try:
        yield
    except OSError as error:
        raise unwritable(error.strerror) from error


def unwritable(reason: str | None) -> BuildError:
    """The error of a cache that cannot be written."""
    return BuildError(
        f"the cache folder {cache_dir()} cannot be written",
        values={"reason": reason},
        works="set FAGEN_CACHE_DIR to a folder that can",
    )


@contextmanager
def _scratch() -> Iterator[Path]:
    """Give an empty folder on the cache's own file system, gone afterwards."""
    made = _made(cache_dir() / "tmp")
    with _writing():
        folder = Path(tempfile.mkdtemp(dir=made))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(key: str) -> Iterator[None]:
    """Hold the lock of one key against all other threads and processes."""
    path = _made(cache_dir() / "locks") / key
    while True:
        with _writing():
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(
            OSError
        ):  # some network file systems have no locks: then work is done twice, not wrongly
            fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                break
        os.close(file)  # its holder removed the file while we waited: the lock is another file now
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
        os.close(file)
