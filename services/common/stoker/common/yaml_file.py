"""YAML files that people write: read within bounds, every mistake told with file and line, all of them at once."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

from stoker.common.errors import Code, StokerError

_MOST_TOLD = 100
_MOST_GATHERED = 500
"""Beyond so many a file is read no further: each costs time to find, as what may be meant by a wrong name."""


class Mistakes:
    """What is wrong in a file, gathered while it is read."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, int, str], None] = {}

    def __bool__(self) -> bool:
        return bool(self._told)

    def add(self, node: yaml.Node, what: str) -> None:
        """Note `what` at the line of `node`, in the file that it came from. Raises as `refuse` does where so much is
        wrong that more need not be found."""
        self._told[str(node.start_mark.name), node.start_mark.line + 1, _printable(what)] = None
        if len(self._told) >= _MOST_GATHERED:
            self.refuse()

    def join(self, others: Mistakes) -> None:
        """Note what others have gathered too."""
        self._told |= others._told

    def refuse(self, *, lines: bool = True) -> None:
        """Raise StokerError (BAD_FILE), a line for each mistake, if there is any; without `lines` where nobody wrote
        any."""
        if self._told:
            told = sorted(self._told, key=lambda at: at[:2])
            whole = [f"{source}:{line}: {what}" if lines else f"{source}: {what}" for source, line, what in told]
            if len(whole) > _MOST_TOLD:
                least = "at least " if len(whole) >= _MOST_GATHERED else ""
                whole = [*whole[:_MOST_TOLD], f"and {least}{len(whole) - _MOST_TOLD} mistakes more"]
            raise bad("\n".join(whole))


def _printable(said: str) -> str:
    """Without what would move a terminal's cursor or turn its text around: names come from the file."""
    if said.isprintable():
        return said
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in said)


def text(path: Path, most_bytes: int) -> str:
    """What is in a file of UTF-8. Raises StokerError (BAD_FILE) where it cannot be read or is larger than that."""
    try:
        with path.open("rb") as file:  # a device says nothing of its size before it is read
            raw = file.read(most_bytes + 1)
        if len(raw) > most_bytes:
            raise bad(f"{path} has more than {most_bytes:,} bytes, the most that a file may have")
        return io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8").read()
    except (OSError, UnicodeDecodeError) as error:
        raise bad(f"cannot read {path}: {getattr(error, 'strerror', None) or 'it is no UTF-8 text'}") from error


class _Watched(yaml.SafeLoader):
    """Calls `look` before each node; what that raises ends the reading."""

    look: Callable[[], None] | None = None
    aliases = True

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.look is not None:
            self.look()
        if not self.aliases and self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not read in this file", problem_mark=mark)
        return super().compose_node(parent, index)


def composed(
    content: str, source: str, needs: str, *, aliases: bool = True, look: Callable[[], None] | None = None
) -> yaml.Node:
    """The nodes of a YAML text; `source` names it in them, `needs` says what an empty one lacks.

    Without `aliases` they are a tree, no larger than the text. A megabyte takes some seconds: `look` is called now
    and then, and ends it by raising.
    """
    with _loader(content, source, aliases=aliases, look=look) as loader:
        node = loader.get_node() if loader.check_node() else None
        second = loader.get_node() if node is not None and loader.check_node() else None
    if node is None:
        raise bad(f"{source} is empty; it needs {needs}")
    if second is not None:
        line = second.start_mark.line + 1
        raise bad(f"{source}:{line}: a second document after `---`; this file has one, with {needs}")
    return node


def documents(content: str, source: str, needs: str) -> list[yaml.Node]:
    """The nodes of each document of a YAML text, as they are parted by `---`; empty ones are passed over."""
    found = []
    with _loader(content, source, aliases=True) as loader:
        while loader.check_node():
            node = loader.get_node()
            if node is not None and not _is_empty(node):
                found.append(node)
    if not found:
        raise bad(f"{source} is empty; it needs {needs}")
    return found


def _is_empty(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"


@contextlib.contextmanager
def _loader(
    content: str, source: str, *, aliases: bool, look: Callable[[], None] | None = None
) -> Iterator[yaml.SafeLoader]:
    """Raises StokerError (BAD_FILE) where the text is no YAML."""
    try:
        loader = _Watched(content)
        loader.name, loader.aliases, loader.look = source, aliases, look
        try:
            yield loader
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise bad(f"{source}:{line}: no valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise bad(f"{source}: no valid YAML: {error}") from error
    except (ValueError, OverflowError) as error:  # an escape that names no character
        raise bad(f"{source}: no valid YAML: {error}") from error
    except RecursionError:
        raise bad(f"{source}: nested too deep; a file of settings has a dozen levels") from None


def bad(message: str) -> StokerError:
    """The error for a file that cannot be used."""
    return StokerError(message, reason="BAD_FILE", code=Code.INVALID_ARGUMENT)
