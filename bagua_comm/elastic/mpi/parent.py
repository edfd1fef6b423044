"""The process that has spawned this one to replace a dead one, while the job ran."""

from __future__ import annotations

from dataclasses import dataclass

from ...processes import ProcessId

VARIABLE = "BAGUA_RECRUITER"
"""The environment variable that holds it in a spawned process."""


@dataclass(frozen=True)
class ParentInfo:
    """The process that has spawned this one, and the group that it was spawned in."""

    group: str
    """Identifies the processes that were spawned together."""
    process: ProcessId

    @classmethod
    def parse(cls, text: str) -> ParentInfo:
        """Read the result of `text`.

        >>> ParentInfo.parse("a 1 2 b c 3").text()
        'a 1 2 b c 3'
        """
        group, _, process = text.partition(" ")
        return cls(group, ProcessId.parse(process))

    def text(self) -> str:
        """The value of the environment variable."""
        return f"{self.group} {self.process.text()}"

    def __str__(self) -> str:
        return f"process {self.process.pid} on {self.process.namespace.split()[0]}"

    def has_ended(self) -> bool:
        """Whether the process is known to have ended; only processes of its PID namespace know."""
        return self.process.has_ended()
