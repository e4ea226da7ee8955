"""Engines of our own kernels on a real GPU: what tests/gpu_simulator shows on simulated ones."""

from __future__ import annotations

import pytest

from specrun.gpu.backend import why_no_gpu_backend
from tests.gpu_simulator.test_decoder_heads import (
    target,
    test_a_head_drafts_what_its_formula_says,
    test_texts_with_a_head_are_the_targets_own,
    trained,
)
from tests.gpu_simulator.test_decoder_kernels import (
    engine_of,
    test_a_real_model,
    test_bits_do_not_depend_on_what_a_pass_has_beside,
    test_logits_are_those_of_transformers,
    test_texts_with_drafts_are_the_targets_own,
    test_verify_and_score_read_the_targets_logits,
)

__all__ = [
    "engine_of",
    "target",
    "test_a_head_drafts_what_its_formula_says",
    "test_a_real_model",
    "test_bits_do_not_depend_on_what_a_pass_has_beside",
    "test_logits_are_those_of_transformers",
    "test_texts_with_a_head_are_the_targets_own",
    "test_texts_with_drafts_are_the_targets_own",
    "test_verify_and_score_read_the_targets_logits",
    "trained",
]

REASON = why_no_gpu_backend("cuda")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
