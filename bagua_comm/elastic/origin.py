"""Who has started a process in the place of a dead one, while the job ran."""

from __future__ import annotations

from dataclasses import dataclass

from ..processes import start_of, this_host

VARIABLE = "BAGUA_RECRUITER"
"""The environment variable by which a newcomer learns it."""


@dataclass(frozen=True)
class Origin:
    """Who has started a newcomer, and with whom."""

    name: str
    """That of the newcomers that were started together."""
    pid: int
    start: int
    host: str

    @classmethod
    def parse(cls, text: str) -> Origin:
        """What `text` has written.

        >>> Origin.parse("a 1 2 b c").text()
        'a 1 2 b c'
        """
        name, pid, start, host = text.split(" ", 3)
        return cls(name, int(pid), int(start), host)

    def text(self) -> str:
        """For an environment variable."""
        return f"{self.name} {self.pid} {self.start} {self.host}"

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.split()[0]}"

    def is_gone(self) -> bool:
        """Whether the recruiter has ended, as far as this host can tell."""
        return self.host == this_host() and start_of(self.pid) != self.start
