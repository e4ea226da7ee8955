"""Work that takes long, kept beside the output until the command has ended: one that was stopped can go on with it.

``OUT.checkpoint`` holds ``progress.json`` (what the run is made of, and how far each part of the work is) and what was
written already. It is there only while something in it would be lost.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbuild.artifacts.provenance import difference
from specbuild.files import write_whole
from specbuild.progress import Advance, Stages
from specrun.engine_dir.config import Provenance
from specrun.engine_dir.directories import new_directory, sweep
from specrun.errors import BuildConfigError, CheckpointError, OutputExistsError, SpecError

PROGRESS_NAME = "progress.json"


def beside(output: str | Path, end: str) -> Path:
    """The sibling of ``output`` whose name has ``end`` behind it."""
    path = Path(output).absolute()
    return path.with_name(path.name + end)


def checkpoint_of(output: str | Path) -> Path:
    """Where a run that makes ``output`` is kept until it has ended."""
    return beside(output, ".checkpoint")


def stopped_there(checkpoint: Path) -> OutputExistsError:
    """The error of a command that was not told what to do about a stopped run."""
    return OutputExistsError(
        f"{checkpoint}: a run has stopped there; give --resume to go on with it, or --force to begin anew"
    )


class Part:
    """A part of the work: rows of a text, a batch at a time."""

    def __init__(self, save: Callable[[], None] = lambda: None) -> None:
        self.rows = 0
        """Number of finished rows."""
        self.state: dict[str, Any] = {}
        """Results of the finished rows, as JSON values."""
        self._save = save

    @contextmanager
    def stage(self, stages: Stages, name: str, rows: int) -> Iterator[Advance]:
        """The stage of the command that does the remaining ``rows``."""
        if self.rows:
            stages.say(f"{name}: resumed after {self.rows} of {rows} rows")
        with stages.stage(name, rows - self.rows) as advance:
            yield advance

    def keep(self, rows: int, state: dict[str, Any]) -> None:
        """Note down that ``rows`` are done, and what has come of them all."""
        self.rows, self.state = rows, state
        self._save()


@dataclass
class Run:
    """What a command has done so far."""

    directory: Path
    provenance: Provenance
    """Provenance of what the command makes."""
    parts: dict[str, Part] = field(default_factory=dict)

    @classmethod
    def read(cls, directory: Path) -> Run:
        """The run that has stopped in ``directory``. Raises CheckpointError."""
        try:
            record = json.loads((directory / PROGRESS_NAME).read_bytes())
            run = cls(directory, Provenance.model_validate(record["made"]))
            for name, kept in record["parts"].items():
                part = run._new_part(name)
                part.rows, part.state = kept["rows"], kept["state"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{directory}: no run that can be resumed ({error}); give --force to begin anew"
            ) from error
        return run

    def part(self, name: str) -> Part:
        """A part of the work, as far as it is. Raises OutputExistsError where something else is in the run's place."""
        self._begin()
        return self.parts.get(name) or self._new_part(name)

    @property
    def written(self) -> Path:
        """A directory of the output's, once it is there whole. Raises OutputExistsError as ``part`` does."""
        self._begin()
        return self.directory / "written"

    @property
    def is_begun(self) -> bool:
        """Whether there is anything to lose."""
        return any(part.rows for part in self.parts.values()) or (self.directory / "written").exists()

    def require_same(self, provenance: Provenance) -> None:
        """Raise BuildConfigError where other things are wanted now."""
        if differs := difference(self.provenance, provenance):
            raise BuildConfigError(
                f"--resume: the run in {self.directory} began {differs}; give the same, or --force to begin anew"
            )

    def remove(self) -> None:
        """Leave nothing behind; a directory that is none of a run's stays."""
        if (self.directory / PROGRESS_NAME).is_file():
            shutil.rmtree(self.directory, ignore_errors=True)

    def _new_part(self, name: str) -> Part:
        return self.parts.setdefault(name, Part(self._save))

    def _begin(self) -> None:
        if not (self.directory / PROGRESS_NAME).is_file():
            if self.directory.exists() and any(self.directory.iterdir()):
                raise OutputExistsError(
                    f"{self.directory}: exists, and unfinished work would be kept there; move it away, or choose "
                    "another --output_dir"
                )
            with new_directory(self.directory, force=False) as work:
                (work / PROGRESS_NAME).write_bytes(self._record())

    def _save(self) -> None:
        write_whole(self.directory / PROGRESS_NAME, self._record())

    def _record(self) -> bytes:
        parts = {name: {"rows": part.rows, "state": part.state} for name, part in self.parts.items()}
        return json.dumps({"made": self.provenance.model_dump(mode="json"), "parts": parts}).encode()


def stopped_run(output: Path, resume: bool, force: bool) -> Run | None:
    """The run for ``output`` that is to go on.

    Raises OutputExistsError where one has stopped and no option says what to do about it, CheckpointError.
    """
    directory = checkpoint_of(output)
    if not (directory / PROGRESS_NAME).is_file():
        return None
    if resume:
        return Run.read(directory)
    if not force:
        raise stopped_there(directory)
    return None


@contextmanager
def run_for(output: Path, provenance: Provenance, stopped: Run | None, stages: Stages) -> Iterator[Run]:
    """A run that makes ``output``, or goes on with ``stopped``. What is left of another one is removed.

    Its work is kept where the block is stopped or fails for the machine's reasons, like a full disk. It is removed when
    the block succeeds, and where it raises a SpecError, as the same command would fail again; but for one that says
    that something else is in the output's place.

    Raises BuildConfigError where ``stopped`` began with other things.
    """
    run = Run(checkpoint_of(output), provenance)
    if stopped is None:
        run.remove()
    else:
        stopped.require_same(provenance)
        run = stopped
        sweep(run.written)
    try:
        yield run
    except BaseException as error:
        if run.is_begun and (isinstance(error, OutputExistsError) or not isinstance(error, SpecError)):
            stages.say(f"what was done is kept in {run.directory}; the same command with --resume goes on")
        else:
            run.remove()
        raise
    run.remove()
