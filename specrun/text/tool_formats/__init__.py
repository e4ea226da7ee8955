"""The forms in which families of models write calls of tools: a module for each. To add one, list it in ``FORMATS``."""

from __future__ import annotations

from specrun.text.tool_formats import (
    command,
    deepseek,
    function_gemma,
    glm4,
    harmony,
    hermes,
    json_list,
    kimi_k2,
    llama3,
    minimax,
    mistral,
    pythonic,
    qwen3_coder,
)
from specrun.text.tool_formats.base import ToolFormat

FORMATS: dict[str, ToolFormat] = {
    form.name: form
    for form in (
        harmony.HARMONY,
        kimi_k2.KIMI_K2,
        deepseek.DEEPSEEK_V3,
        deepseek.DEEPSEEK_V31,
        command.COMMAND,
        function_gemma.FUNCTION_GEMMA,
        minimax.MINIMAX_M2,
        minimax.MINIMAX,
        mistral.MISTRAL,
        mistral.MISTRAL_JSON,
        json_list.PHI4,
        json_list.GRANITE,
        qwen3_coder.SEED_OSS,
        qwen3_coder.QWEN3_CODER,
        glm4.GLM4,
        hermes.HERMES,
        pythonic.PYTHONIC,
        llama3.LLAMA3,
    )
}
"""All forms by name. A template's is the first one that fits it."""


def find_format(template: str) -> ToolFormat | None:
    """The form of calls that a chat template tells the model of; None: none of those that are known."""
    return next((form for form in FORMATS.values() if form.fits(template)), None)
