"""Every error this project raises for a user's mistake or a file's fault.

SpecError                      shown in one line; exit status 1
├── CheckpointError            a Hugging Face or ONNX checkpoint is missing, broken or refused
│   └── UnsupportedModelError  the architecture cannot be converted; says why
├── VerificationError          the exported graph and the model disagree
├── BuildConfigError           build settings contradict each other or the checkpoint
├── BuildError                 a compiler refused the graph
├── BackendError               a backend is not installed, or its hardware is missing
│   └── EngineLostError        an engine cannot go on, because one of its processes is gone
├── OutputExistsError          the output directory exists and --force was not given
├── EngineDirError             an engine directory is half written, newer, altered or for other hardware
├── PairError                  the draft and the target do not fit together
└── RequestError               a prompt or parameter cannot be served
    └── ContextLengthError     the prompt, or prompt and output together, are too long for the engine
"""

from __future__ import annotations


class SpecError(Exception):
    """Base of all errors here. The message is one line: what, where, what was expected, what to do."""


class CheckpointError(SpecError):
    """A checkpoint is missing, broken or refused."""


class UnsupportedModelError(CheckpointError):
    """The model's architecture cannot be converted."""


class VerificationError(SpecError):
    """The exported graph's logits differ from the model's."""


class BuildConfigError(SpecError):
    """Build settings that contradict each other or the checkpoint."""


class BuildError(SpecError):
    """A compiler refused the graph."""


class BackendError(SpecError):
    """A backend is not installed, or its hardware is missing."""


class EngineLostError(BackendError):
    """An engine cannot go on: one of its processes has ended or does not answer."""


class OutputExistsError(SpecError):
    """The output directory exists."""


class EngineDirError(SpecError):
    """An engine directory cannot be loaded."""


class PairError(SpecError):
    """Draft and target do not fit together."""


class RequestError(SpecError):
    """A request that cannot be served. ``param``: the parameter at fault; None if it is none in particular."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """A prompt, or prompt and output together, that are longer than the engine takes."""


def as_spec_error(error: BaseException) -> SpecError:
    """What went wrong, for the request that it ends."""
    return error if isinstance(error, SpecError) else BackendError(f"broken off: {error!r}")


def first_line(error: Exception) -> str:
    """What an error of another library says."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # "Validation error for field 'hidden_size':" says nothing without the line after it.
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
