"""Write the pictures of the state machines into docs/PROTOCOL.md, from the transition tables."""

from __future__ import annotations

from pathlib import Path

from atoll.core.contributions import CONTRIBUTION
from atoll.core.finish import PHASE
from atoll.core.learner import LEARNER
from atoll.core.machine import Table
from atoll.core.members import MEMBER
from atoll.core.slot import SLOT

PAGE = Path(__file__).parent.parent / "docs" / "PROTOCOL.md"
BEGIN, END = "<!-- pictures -->", "<!-- /pictures -->"
TABLES = (PHASE, MEMBER, SLOT, CONTRIBUTION, LEARNER)


def picture(table: Table) -> str:
    """A mermaid state diagram; parallel causes share an arrow."""
    causes: dict[tuple[str, str], list[str]] = {}
    for (state, cause), target in table.rows.items():
        causes.setdefault((state, target), []).append(cause)
    lines = [f"### {table.name}", "```mermaid", "stateDiagram-v2", f"    [*] --> {table.initial}"]
    lines += [f"    {state} --> {target}: {' / '.join(names)}" for (state, target), names in causes.items()]
    lines += [f"    {state} --> [*]" for state in sorted(table.final)]
    return "\n".join([*lines, "```"])


def page(text: str) -> str:
    """The page with current pictures."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return head + BEGIN + "\n" + "\n\n".join(map(picture, TABLES)) + "\n" + END + tail


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
