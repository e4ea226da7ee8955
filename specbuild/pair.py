"""Engines of a target and its draft, built once and kept: what ``specrun`` asks for, in a process of its own.

    python -P -m specbuild.pair '{"target": "owner/big", "draft": "/models/small", "options": {}}'

The argument holds fields of ``PairRequest``. Standard output gets a line of JSON: the engine directories by name, or
``error``, with the name of its class as ``kind``. An engine's place in the cache depends on the content of its
checkpoint and on the settings, not on where the checkpoint is. Nothing heavy is imported for engines that are there.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild import __version__
from specbuild.artifacts.known_checkpoints import KnownCheckpoints
from specbuild.head_formats.detect import holds_head, holds_own_head
from specbuild.hf.gguf.checkpoint import origin_of
from specbuild.hf.local import local_directory
from specbuild.hf.unsupported import no_config, refuse_other_formats
from specbuild.weights.safetensors_files import file_names
from specrun import cpu_operators
from specrun.builder import BuildOptions, is_checkpoint
from specrun.command_line import explain_error, fewer_collections, stop_signals
from specrun.config import Check
from specrun.engine_dir.checksums import key_of
from specrun.engine_dir.config import CONFIG_NAME, EngineConfig, open_engine, read_config
from specrun.engine_dir.directories import locked, new_directory
from specrun.engine_dir.user_cache import cached_engines, note_use, remove_locked, require_own
from specrun.errors import BuildConfigError, EngineDirError, PairError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from specbuild.convert.options import ConvertOptions

_NOT_VERIFIED = "not-verified"
"""A file beside an engine that was built of a conversion that nothing was compared with."""
MAX_SEQ_LEN = 4096
"""Default for engines of models with more positions, in tokens."""


@dataclass(frozen=True)
class PairRequest:
    """What is wanted. Each model is a checkpoint's directory or Hub ID, or an engine directory."""

    target: str
    draft: str | None = None
    """A checkpoint may hold a draft head. The target's own has MTP layers or Medusa heads."""
    options: BuildOptions = field(default_factory=BuildOptions)
    for_chat: bool = False
    """Check that prompts can be put into a chat template."""
    chat_template: str | None = None
    """A file that replaces the target's own template in chats. It is in no engine."""
    check: Check = "quick"
    """Choice of the files of existing engines to compare with their checksums."""


class Pair:
    """The models of a request: what is built of them, and where it is kept.

    Raises SpecError where the request contradicts itself, and ImportError where a package is missing.
    """

    def __init__(self, request: PairRequest) -> None:
        self.request, self.options = request, request.options
        self.target = _locate(request.target, "TARGET", self.options.revision, self.options.trust_remote_code)
        self.draft: Path | None = None
        if request.draft is not None:
            same = request.draft == request.target
            revision = self.options.revision if same else self.options.draft_revision
            self.draft = _locate(request.draft, "DRAFT", revision, self.options.trust_remote_code)
        self.lora: Path | None = None
        if self.options.lora is not None:
            if not is_checkpoint(self.target):
                raise PairError(f"--lora {self.options.lora}: {self.target} is an engine already; give its checkpoint")
            from specbuild.hf.hub import locate

            self.lora = locate(self.options.lora, None, "--lora", head=True).resolve()
        self._onnx: set[Path] = set()
        """Conversions that engines were built of."""
        self.known = KnownCheckpoints(cached_engines() / "checkpoints.json")
        self.checkpoints = [model for model in (self.target, self.draft) if model and is_checkpoint(model)]
        if self.head and self.target not in self.checkpoints:
            raise PairError(
                f"{self.head}: is a draft head, and {self.target} is an engine already; give the target's checkpoint, "
                "because both are built together"
            )

    @cached_property
    def head(self) -> Path | None:
        """The draft where it is a head; the target itself where it holds one and is named twice."""
        if self.draft is None or not is_checkpoint(self.draft):
            return None
        is_head = holds_own_head(self.draft) if self.draft == self.target else holds_head(self.draft)
        return self.draft if is_head else None

    @cached_property
    def max_seq_len(self) -> int:
        """That of both engines. Raises SpecError."""
        if self.options.max_seq_len is not None:
            return self.options.max_seq_len
        if self.target not in self.checkpoints:  # A draft needs what its target has.
            return _max_seq_len_of_engine(self.target)
        limits = [self.known.max_seq_len_of(model, partial(self._trained_for, model)) for model in self.models]
        if self.draft and self.draft not in self.checkpoints:
            limits.append(_max_seq_len_of_engine(self.draft))
        return min([MAX_SEQ_LEN, *(limit for limit in limits if limit is not None)])

    @property
    def models(self) -> list[Path]:
        """The checkpoints of whole models."""
        return [model for model in self.checkpoints if model == self.target or model != self.head]

    def _trained_for(self, model: Path) -> int | None:
        from specbuild.hf.model_facts import positions_of

        _require_packages()
        return positions_of(self._read_config(model))

    def _read_config(self, model: Path) -> PreTrainedConfig:
        from specbuild.hf.model_config import read_model_config

        text_model = self.options.text_model and model == self.target
        return read_model_config(model, self.options.trust_remote_code, text_model)

    def place_of(self, role: str) -> Path:
        """Where the cache has the engine of a checkpoint, or would have it. role: ``target`` or ``draft``."""
        options, models = self.options, {"target": self.target, "draft": self.draft}
        read = {role: models[role], **({"target": self.target, "head": self.head} if self.head else {})}
        if role == "target":
            read["lora"] = self.lora
        content = {name: self.known.inputs_of(model) for name, model in read.items() if model}
        sizes = [options.max_batch_size, self.max_seq_len]
        if role == "target" or self.head:
            sizes.append(options.max_draft_len)
        text_model = options.text_model and role == "target"
        forms: list[object] = [options.qformat, options.kv_cache_dtype, options.device, text_model]
        if role == "target" and options.tp_size > 1:
            forms.append(options.tp_size)
        if role == "draft" and options.draft_vocab_size is not None:
            forms.append(options.draft_vocab_size)
        machine = [platform.machine(), cpu_operators.VERSION]
        model = models[role]
        assert model
        key = key_of([__version__, machine, role, content, forms, sizes])[:16]
        return cached_engines() / f"{origin_of(model).name}-{key}"

    def engines(self) -> dict[str, Path]:
        """The engine directories ``target`` and ``draft``, built where they are not there."""
        models = {"target": self.target, **({"draft": self.draft} if self.draft else {})}
        places = {role: self.place_of(role) for role, model in models.items() if model in self.checkpoints}
        self.known.save()
        for directory in places.values():
            require_own(directory)
        missing = {role: directory for role, directory in places.items() if self._problem(directory)}
        if missing:
            self.require_fit()
        for role, directory in missing.items():
            self._build(role, models[role], directory)
        for onnx in self._onnx:
            with locked(onnx):
                shutil.rmtree(onnx, ignore_errors=True)
        for directory in places.values():
            note_use(directory)
        return {role: places[role] / "engine" if role in places else model for role, model in models.items()}

    def require_fit(self) -> None:
        """Raise SpecError for what would fail after the engines are built, as far as it shows before.

        Raises ImportError where a package is missing.
        """
        from specbuild.hf.model_facts import positions_of
        from specrun.text.chat_template import ChatTemplate
        from specrun.text.retokenizer import open_translator
        from specrun.text.tokenizer import describe_tokenizer

        _require_packages()
        if self.draft and not self.head:
            ours, theirs = (describe_tokenizer(directory, PairError) for directory in (self.target, self.draft))
            if ours and theirs and ours.fingerprint != theirs.fingerprint:
                open_translator(self.target, self.draft)
        if self.request.for_chat:
            template = Path(self.request.chat_template) if self.request.chat_template else None
            ChatTemplate.load(self.target, template).render([{"role": "user", "content": "?"}])
        for model in self.models:
            limit, asked = positions_of(self._read_config(model)), self.options.max_seq_len
            if asked and limit and asked > limit:
                raise BuildConfigError(f"--max_seq_len {asked}: {model} has {limit} positions; give at most that")

    def _build(self, role: str, model: Path, directory: Path) -> None:
        """Build one engine, unless another process has done so meanwhile."""
        from specbuild.progress import Stages

        say = Stages().say
        with locked(directory, lambda: say("another process is building this engine; waiting for it")):
            if not (problem := self._problem(directory)):
                return
            if directory.is_dir():
                say(f"{problem}: this engine in the cache is built again")
                remove_locked(directory)
            say(f"{origin_of(model)} is built once and kept in {directory}")
            with new_directory(directory, force=False) as work:
                self._write(role, model, work)

    def _problem(self, directory: Path) -> str | None:
        """What is wrong with an entry of the cache; None: it can be used."""
        if not directory.is_dir():
            return "missing"
        try:
            open_engine(directory / "engine", every_byte=self.request.check == "full")
        except EngineDirError as error:
            return f"{str(error).partition(';')[0]}: damaged"
        if self.options.verify and (directory / _NOT_VERIFIED).exists():
            return "built with --no-verify"
        return None

    def _write(self, role: str, model: Path, work: Path) -> None:
        from specbuild.convert.convert import convert
        from specbuild.engine.build import build_engine
        from specbuild.engine.config import EngineOptions
        from specbuild.progress import Stages

        options, conversion = self.options, self._conversion(role, model)
        onnx = Path(conversion.output_dir)
        shown = origin_of(model)
        stages = Stages(names={onnx: f"{shown} as ONNX", work / "engine": f"engine of {shown}", model: str(shown)})
        of_model = EngineOptions(
            checkpoint_dir=onnx,
            output_dir=work / "engine",
            device=options.device,
            max_batch_size=options.max_batch_size,
            max_seq_len=self.max_seq_len,
            max_input_len=self.max_seq_len - 1,
            max_draft_len=options.max_draft_len if role == "target" or conversion.head_of else None,
            tp_size=options.tp_size if role == "target" else 1,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        with locked(onnx):
            self._onnx.add(onnx)
            convert(conversion, stages)
            build_engine(of_model, stages=stages)
        if not options.verify:
            (work / _NOT_VERIFIED).touch()

    def _conversion(self, role: str, model: Path) -> ConvertOptions:
        """What is converted, and where: a stopped build goes on there, and both roles of one checkpoint share it."""
        from specbuild.artifacts.provenance import releases
        from specbuild.convert.inputs import PACKAGES
        from specbuild.convert.options import ConvertOptions

        options = self.options
        conversion = ConvertOptions(
            str(model), "", trust_remote_code=options.trust_remote_code, verify=options.verify, resume=True
        )
        if role == "draft" and self.head is not None:
            qformat = options.qformat if options.qformat.startswith("int") else "auto"
            conversion = replace(conversion, head_of=str(self.target), qformat=qformat)
        else:
            conversion = replace(
                conversion,
                qformat=options.qformat,
                text_model=options.text_model and role == "target",
                draft_vocab_size=options.draft_vocab_size if role == "draft" else None,
                head=str(self.head) if self.head else None,
                lora=str(self.lora) if self.lora and role == "target" else None,
            )
        directories = [
            model,
            *([self.target, self.head] if self.head else []),
            Path(conversion.lora) if conversion.lora else None,
        ]
        read = [self.known.inputs_of(directory) for directory in directories if directory]
        forms = [
            conversion.qformat,
            conversion.text_model,
            conversion.draft_vocab_size,
            conversion.verify,
            bool(conversion.head),
            bool(conversion.head_of),
        ]
        key = key_of([__version__, releases(*PACKAGES), read, forms])[:16]
        return replace(conversion, output_dir=cached_engines() / f"{origin_of(model).name}-{key}.onnx")


def _locate(model: str, option: str, revision: str | None, code: bool) -> Path:
    """The directory of a model, without links in its path. A Hub ID is downloaded. Raises CheckpointError."""
    if not is_checkpoint(model) and Path(model).expanduser().is_dir():
        return Path(model).expanduser().resolve()  # An engine, or what opening it says.
    if (directory := local_directory(model, option)) is not None:
        if not (directory / CONFIG_NAME).is_file():
            refuse_other_formats(directory, file_names(directory))
            raise no_config(directory)
        return directory.resolve()
    from specbuild.hf.hub import locate

    return locate(model, revision, option, code=code, head=None if option == "DRAFT" else False).resolve()


def _max_seq_len_of_engine(directory: Path) -> int:
    return read_config(directory, EngineConfig, EngineDirError, "specbuild engine").build_config.max_seq_len


def _require_packages() -> None:
    """Raise ModuleNotFoundError where one is missing that a build needs."""
    from specbuild.convert.convert import PACKAGES
    from specbuild.hf.model_facts import require_packages

    require_packages(*PACKAGES, "onnxruntime")


def main() -> None:
    """Answer the request in the first argument. What libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        asked = json.loads(sys.argv[1])
        asked["options"] = BuildOptions(**asked.get("options", {}))
        json.dump(_answer(PairRequest(**asked)), answer)


def _answer(request: PairRequest) -> dict[str, str]:
    with stop_signals() as received, fewer_collections():
        try:
            return {name: str(path) for name, path in Pair(request).engines().items()}
        except BaseException as error:
            if received:
                sys.exit(128 + received[0])  # The parent process prints the message.
            if isinstance(error, Exception) and (reason := explain_error(error, "specbuild")):
                return {"error": reason, "kind": type(error).__name__}
            raise


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # To take torch and the graphs down would take two seconds, for which the command would wait.
