"""What was found out of checkpoints, kept in a file: checksums while their files stay, facts of their content."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from specbuild.artifacts.checksums import Inputs, describe_inputs
from specbuild.files import write_whole
from specrun.engine_dir.checksums import key_of
from specrun.engine_dir.directories import locked


class KnownCheckpoints:
    """The file's content. What cannot be read in it counts as nothing."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._digests: dict[str, Inputs] = {}
        self._max_seq_lens: dict[str, int | None] = {}
        self._compared: set[str] = set()
        """Directories whose files were compared with their checksums in this process."""
        try:
            data = json.loads(file.read_bytes())
            digests = {name: Inputs(*noted) for name, noted in data["digests"].items()}
            self._max_seq_lens = {str(key): value for key, value in data["max_seq_lens"].items()}
            self._digests = digests
        except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
            pass
        self._read = self._content()

    def _content(self) -> str:
        digests = {name: list(noted) for name, noted in self._digests.items()}
        return json.dumps({"digests": digests, "max_seq_lens": self._max_seq_lens})

    def inputs_of(self, directory: Path) -> dict[str, str]:
        """Checksums of a checkpoint's files, by name. Files that have changed since are read, once. Raises OSError."""
        name = str(directory)
        if name not in self._compared:
            self._digests[name] = describe_inputs({"": directory}, self._digests.get(name))
            self._compared.add(name)
        return self._digests[name].inputs

    def max_seq_len_of(self, directory: Path, read: Callable[[], int | None]) -> int | None:
        """Positions that a checkpoint was trained for. ``read`` finds them where its content is new here."""
        key = key_of(self.inputs_of(directory))
        if key not in self._max_seq_lens:
            self._max_seq_lens[key] = read()
        return self._max_seq_lens[key]

    def save(self) -> None:
        """Write the file, where something is new."""
        if (content := self._content()) == self._read:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with locked(self._file):
            write_whole(self._file, content.encode())
        self._read = content
