"""Who has started a process in the place of a dead one, while the job ran."""

from __future__ import annotations

from dataclasses import dataclass

from ...processes import ProcessId

VARIABLE = "BAGUA_RECRUITER"
"""The environment variable by which a newcomer learns it."""


@dataclass(frozen=True)
class Origin:
    """Who has started a newcomer, and with whom."""

    name: str
    """That of the newcomers that were started together."""
    process: ProcessId

    @classmethod
    def parse(cls, text: str) -> Origin:
        """What `text` has written.

        >>> Origin.parse("a 1 2 b c 3").text()
        'a 1 2 b c 3'
        """
        name, _, process = text.partition(" ")
        return cls(name, ProcessId.parse(process))

    def text(self) -> str:
        """For an environment variable."""
        return f"{self.name} {self.process.text()}"

    def __str__(self) -> str:
        return f"process {self.process.pid} on {self.process.namespace.split()[0]}"

    def is_gone(self) -> bool:
        """Whether the recruiter has ended, as far as can be seen from here."""
        return self.process.has_ended()
