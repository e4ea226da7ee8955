"""Further machines, which the kernel plays: networks of their own (ip-netns(8)) with cables to ours."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A network namespace with a cable to ours; none where ``number`` is 0."""

    number: int

    @property
    def name(self) -> str:
        return f"specrun-{os.getpid()}-{self.number}"

    @property
    def cable(self) -> str:
        return f"sr{os.getpid() % 10**7}-{self.number}"

    @property
    def within(self) -> list[str]:
        """The command that runs another one there."""
        return ["ip", "netns", "exec", self.name] if self.number else []

    @property
    def host(self) -> str:
        return self.address(2) if self.number else "127.0.0.1"

    def address(self, end: int) -> str:
        """Of one end of the cable: 1 is ours."""
        return f"10.213.{os.getpid() % 256}.{4 * self.number + end}"

    def make(self) -> None:
        ip("netns", "add", self.name)
        ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("address", "add", f"{self.address(1)}/30", "dev", self.cable)
        self.connect(True)
        for command in (["address", "add", f"{self.host}/30", "dev", "eth0"], ["link", "set", "eth0", "up"]):
            ip("-netns", self.name, *command)

    def connect(self, up: bool) -> None:
        ip("link", "set", self.cable, "up" if up else "down")

    def remove(self) -> None:
        for command in (["link", "delete", self.cable], ["netns", "delete", self.name]):
            with suppress(OSError):
                subprocess.run(["ip", *command], capture_output=True, check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)
