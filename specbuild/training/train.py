"""``specbuild train_draft``: a target's checkpoint and conversations -> a draft's checkpoint."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbuild.artifacts.resume import stopped_there
from specbuild.files import require_space
from specbuild.hf.hub import locate
from specbuild.hf.model_config import read_model_config, save_generation_config, save_tokenizer
from specbuild.hf.model_facts import positions_of, require_packages, vocab_size_of
from specbuild.progress import Stages, peak_memory
from specbuild.quantized_formats.config.schemes import require_dense
from specbuild.training.options import TrainOptions
from specbuild.weights.safetensors_files import check_weights, require_layers
from specrun.command_line import human_bytes
from specrun.engine_dir.directories import new_directory, require_free
from specrun.errors import BackendError, BuildConfigError, CheckpointError, first_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from specbuild.training.data.rows import Data, RowMaker
    from specbuild.training.student import Student

ANSWER_TEMPERATURE = 0.7
"""Temperature of answers to train on: what people use most."""
_CHECKPOINT_BYTES = 12
"""Bytes of a parameter: itself and two means, in float32, in two checkpoints while one replaces the other."""


def train_draft(options: TrainOptions, stages: Stages) -> dict[str, Any]:
    """Train a draft; returns what training.json says of it.

    Raises SpecError; KeyboardInterrupt for Ctrl-C, when the run was written so that it can be resumed.
    """
    require_packages("torch", "transformers", "safetensors", "onnx_ir", "jinja2")
    output = Path(options.output_dir)
    require_free(output, options.force)
    if options.checkpoint.exists() and not (options.resume or options.force):
        raise stopped_there(options.checkpoint)
    # Outside the stage, which has a bar: the Hub's client has bars of its own.
    directory = locate(options.model, options.revision, code=options.trust_remote_code)
    with stages.stage("check checkpoint"):
        config = read_model_config(directory, options.trust_remote_code)
        require_dense(directory, "train on the checkpoint that it was made of: the draft fits both")
        require_layers(directory, config, check_weights(directory))
    import torch

    from specbuild.training.data.rows import RowMaker, read_data
    from specbuild.training.loop import Plan, Trainer
    from specbuild.training.state import load_optimizer, read_run, save_run, write_record

    device = _device(options.device)
    is_mixed = options.dtype == "bfloat16" or (options.dtype == "auto" and device.type == "cuda")
    dtype = torch.bfloat16 if is_mixed else torch.float32
    text = config.get_text_config()
    length = min(options.max_length, positions_of(config) or options.max_length)
    maker = RowMaker(directory, length, text.vocab_size, options.trust_remote_code)
    data = read_data(options.data, "--data", maker) if options.data else None  # Bad lines are told at once.
    with stages.stage("load the target"):
        target = _load_target(directory, config, dtype, device, options.trust_remote_code)
    if data is None:
        data = _answered(options, target, maker, stages)
    too_short = f"; {data.skipped} are too short" if data.skipped else ""
    stages.say(f"data: {len(data.rows)} texts to train on, {len(data.held_out)} to compare on{too_short}")
    settings = options.settings()
    if not (options.resume and options.checkpoint.exists()):
        with new_directory(options.checkpoint, force=True) as work:
            _write_new(work, target, data, options)
            write_record(work, {"step": 0, "settings": settings, "history": []})
    step, history = read_run(options.checkpoint, settings)
    student = _open_student(options.checkpoint, target, options)
    plan = Plan(
        steps=options.steps or options.num_epochs * data.num_batches(options.batch_size),
        batch_size=options.batch_size,
        learning_rate=options.rate(text.hidden_size),
        seed=options.seed,
        save_steps=options.save_steps,
        num_drafts=options.num_drafts,
        optimizer=options.optimizer,
    )
    count = sum(parameter.numel() for parameter in student.trained.values())
    require_space({output.absolute().parent: 2 * count * _CHECKPOINT_BYTES})
    trainer = Trainer(student, target, data, plan, dtype)
    if step:
        trainer.step = step
        load_optimizer(options.checkpoint, trainer)
        stages.say(f"resumed after step {step}")

    def at_pause(loss: float, is_stop: bool) -> None:
        if is_stop:
            said = (
                f"stopped after step {trainer.step} of {plan.steps}; the same command with --resume goes on, and with "
                f"--resume --steps {trainer.step} it ends here"
            )
        else:
            score = trainer.compare_held_out()
            history.append({"step": trainer.step, "loss": round(loss, 4), **score.summary()})
            said = f"step {trainer.step} of {plan.steps}: loss {loss:.3f}; held out: {score.describe()}"
        save_run(options.checkpoint, trainer, settings, history)
        stages.say(said)

    with stages.stage("train", max(0, plan.steps - step)) as advance:
        trainer.run(partial(advance, 1), at_pause)
    record = {"step": trainer.step, "settings": settings, "history": history}
    with new_directory(output, options.force) as work:
        student.save(work, config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32)
        if options.kind == "model":
            save_tokenizer(directory, work, options.trust_remote_code)
            save_generation_config(directory, work)
        write_record(work, record)
    shutil.rmtree(options.checkpoint, ignore_errors=True)
    stages.say(
        f"{output}: {options.kind}, {count / 1e6:.1f}M parameters trained, {stages.seconds:.0f} s, peak memory "
        f"{human_bytes(peak_memory())}"
    )
    return record


def _device(name: str | None) -> torch.device:
    """Raises BuildConfigError, BackendError."""
    import torch

    usable = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda" if usable else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise BuildConfigError(f"--device {name}: expected cpu, cuda, or a GPU by its number, like cuda:1")
    if device.type == "cuda" and (not usable or (device.index or 0) >= torch.cuda.device_count()):
        raise BackendError(f"--device {name}: PyTorch {torch.__version__} finds no such GPU; give --device cpu")
    return device


def _load_target(
    directory: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> PreTrainedModel:
    """The target, whole and frozen. Raises CheckpointError, UnsupportedModelError."""
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=dtype, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        raise CheckpointError(f"{directory}: transformers cannot load it ({first_line(error)})") from error
    vocab_size_of(model)
    frozen: PreTrainedModel = model.eval().requires_grad_(False).to(device)
    return frozen


def _answered(options: TrainOptions, target: PreTrainedModel, maker: RowMaker, stages: Stages) -> Data:
    """The target's own answers to ``options.prompts``, which are kept beside the output."""
    from specbuild.training.data.answers import Sampling, answer_with_model
    from specbuild.training.data.prepare import answer_file
    from specbuild.training.data.rows import read_data

    assert options.prompts is not None
    sampling = Sampling(options.max_length, ANSWER_TEMPERATURE, options.seed)
    answer = partial(answer_with_model, target, maker, options.batch_size, sampling)
    answer_file(options.prompts, options.answers, True, answer, stages)
    return read_data(options.answers, "--prompts", maker)


def _write_new(directory: Path, target: PreTrainedModel, data: Data, options: TrainOptions) -> None:
    """A draft that has learnt nothing. Raises BuildConfigError."""
    from specbuild.training.eagle3 import write_new_head
    from specbuild.training.small_model import write_new_model

    if options.kind == "model":
        write_new_model(directory, target, options.num_layers, options.hidden_size, options.seed)
    else:
        vocab_size, chosen = vocab_size_of(target), None
        if (size := options.draft_vocab_size) is not None:
            if size > vocab_size:
                raise BuildConfigError(f"--draft_vocab_size {size}: the target has {vocab_size} tokens")
            chosen = data.commonest(size, vocab_size)
        write_new_head(directory, target, chosen, options)


def _open_student(directory: Path, target: PreTrainedModel, options: TrainOptions) -> Student:
    """The draft in a directory, as it was written or has become."""
    from specbuild.training.eagle3 import Eagle3Student
    from specbuild.training.small_model import ModelStudent

    if options.kind == "model":
        return ModelStudent(directory, target.device, options.trust_remote_code)
    return Eagle3Student(directory, target, options.num_drafts)
