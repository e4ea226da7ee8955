"""What ``scripts/test`` leaves to ``scripts/test --all``: the further members of matrices, and what needs much time.

A rule keeps at least one test in ``scripts/test``; the comment says which. Each line here must fit a test.
"""

from __future__ import annotations

FILES = {
    "evaluation/test_report_browser.py": "the page's structure: evaluation/test_report.py",
    "export/test_more_families.py": "families convert: export/test_families.py",
    "backends/test_rank_machines.py": "ranks that have their caches themselves: backends/test_cpu_ranks.py",
    "compilers/test_deep_plans.py": "plans compile: compilers/test_tensorrt.py, quantization/test_kv_cache.py",
    "heads/test_plans.py": "heads compile: heads/test_dflash.py::test_plans_write_back_what_they_read",
    "kernels/test_kernel_races.py": "kernels compute what numpy does: kernels/test_kernels.py",
    "scripts/test_wheel.py": "what is installed: test_front_door.py",
    "serve/test_clients.py": "the API's shapes: serve/test_answers.py, serve/test_requests.py",
    "serve/test_router.py": "health and answers of one server: serve/test_command.py, serve/test_answers.py",
    "training/test_grown_heads.py": "heads are trained: training/test_trained.py",
    "triton/test_server.py": "what is written: triton/test_repository.py; answers: serve/test_answers.py",
    "test_real_model.py": "texts of small models: export/test_families.py, speculative/",
    "test_examples.py": "options and Python of the pages: test_docs.py; commands: commands/test_commands.py",
    "gpu_simulator/test_gpu_check.py": "the same program on the host build: scripts/test_gpu_check.py",
}
"""Whole files, and what sees most of their faults without them."""

TESTS = {
    "artifacts/test_interrupted.py::test_interrupt_convert_before_it_writes",  # test_interrupt_convert
    "artifacts/test_interrupted.py::test_interrupt_workers_when_one_is_idle",  # test_interrupt_workers
    "artifacts/test_resume.py::test_a_conversion_goes_on_after_signals",  # ..goes_on_to_the_same_files
    "convert/test_memory.py::test_convert_never_holds_the_weights",  # test_experts_are_never_dequantized_together
    "convert/test_parity_check.py::test_multi_head_latent_attention_converts",  # export/test_families.py, deepseek_v2
    "export/test_recurrent_families.py::test_in_16_bits",  # test_family, in float32
    "gpu_simulator/test_heads.py::test_heads_that_draft_in_one_pass",  # test_heads_that_draft_a_block
    "gpu_simulator/test_recurrent.py::test_its_own_prediction_layer_drafts",  # heads/test_mtp.py, on the host
    "graph/test_used_experts.py::test_a_plan_with_quantized_experts",  # test_quantized_experts
    "graph/test_used_experts.py::test_checkpoints_with_quantized_experts",  # the same
    "heads/test_checkpoints.py::test_a_target_that_is_named_twice_drafts_with_its_own_layer",  # heads/test_mtp.py
    "heads/test_dflash.py::test_transformers_own_model_of_the_kind_agrees",  # test_logits_of_blocks
    "heads/test_bad_medusa.py::test_heads_that_came_with_another_model",  # heads/test_bad_heads.py has its like
    "heads/test_dflash_rounds.py::test_rounds_draft_what_the_formula_says",  # heads/test_dflash.py, one block
    "heads/test_dialects.py::test_other_heads_of_recurrent_targets",  # test_features_of_other_targets
    "scripts/test_end_to_end.py::test_gpu_check_makes_its_models",  # scripts/test_gpu_check.py
    "scripts/test_end_to_end.py::test_a_newcomers_second_command_is_chat",  # commands/test_models.py
    "scripts/test_end_to_end.py::test_chat_wraps_the_prompt_in_the_template",  # chat/test_chat.py
    "test_front_door.py::test_a_users_type_checker_sees_the_types",  # scripts/check reads the tests' calls
    "text/test_text_encoder.py::test_memory_comes_back",  # serve/test_long_prompts.py
    "training/test_trained.py::test_a_draft_model_is_distilled",  # training/test_chains.py has its losses
    "training/test_trained.py::test_medusa_heads_learn",  # training/test_chains.py has its losses
}
"""Single tests. Behind each stands what sees most of its faults."""

KEPT = {
    "artifacts/test_interrupted.py::test_interrupt_an_engine_while_it_imports": ("0.01",),
    "artifacts/test_interrupted.py::test_interrupt_engine": ("SIGTERM",),
    "artifacts/test_interrupted.py::test_interrupt_tensorrt": ("Ctrl-C",),
    "backends/test_cpu_ranks.py::test_a_lost_rank_ends_its_step_and_all_ranks": ("killed-1",),
    "backends/test_cpu_ranks.py::test_control_what_other_machines_are_not_told_shows": ("swap",),
    "backends/test_cpu_ranks.py::test_no_text_depends_on_what_is_beside_it": ("two",),
    "backends/test_cpu_ranks.py::test_texts_are_those_of_one_rank": ("shared heads-2", "mixture-2"),
    "bindings/test_tensorrt_bindings.py::test_every_module_that_uses_tensorrt_is_checked": ("11.4",),
    "compilers/test_tensorrt.py::test_attention_is_one_kernel_or_it_is_said": ("float16-16-True",),
    "convert/test_dry_run.py::test_it_says_what_is_then_made": ("auto",),
    "convert/test_parity_check.py::test_a_weight_that_is_not_finite_is_named": ("{}", "nan"),
    "convert/test_parity_check.py::test_a_window_that_is_wrong_by_one_position_is_seen": (
        "right-mistral",
        "shorter-mistral",
        "longer-mistral",
    ),
    "cpu_operators/test_engines.py::test_where_other_tokens_could_see_an_unused_one_it_is_a_token_like_others": (
        "deepseek_v2",
        "qwen3_moe",
    ),
    "cpu_operators/test_engines.py::test_what_another_layer_adds_to_a_pass": ("int4-5",),
    "drafters/test_draft_confidence.py::test_auto_has_all_that_the_best_fixed_length_has": ("1.0-1", "2.5-4", "0.4-8"),
    "drafters/test_other_tokenizer.py::test_the_ids_are_the_targets_own": ("-host-", "alone"),
    "drafters/test_suffix.py::test_acceptance_by_logits_keeps_the_distribution": (
        "all-suffix",
        "all-suffix on a device",
    ),
    "export/test_families.py::test_family": ("deepseek_v2", "mixtral"),
    "export/test_families.py::test_norms_that_are_scaled_in_float32": ("stored0",),
    "export/test_families.py::test_other_dtypes": ("llama3.2-bfloat16",),
    "export/test_meta_model.py::test_parts_and_pieces_make_no_difference": ("llama3.2",),
    "export/test_recurrent_families.py::test_a_wrong_function_is_seen": ("again",),
    "export/test_recurrent_families.py::test_family": ("qwen3_5", "nemotron_h"),
    "gpu_simulator/test_kv_cache.py::test_ids_are_the_cpus": ("2048-True-draft", "32-False-draft"),
    "gpu_simulator/test_queued_ahead.py::test_texts_are_the_cpus": (
        "latest-good-one GPU-True",
        "earliest-good-one GPU-False",
        "earliest-good-apart",
        "latest-None",
    ),
    "gpu_simulator/test_recurrent.py::test_a_wrong_state_shows": ("keeps rejected", "not moved", "kept state"),
    "gpu_simulator/test_recurrent.py::test_ids_are_the_cpus": ("target-near-one GPU", "target-dense-apart-graph"),
    "gpu_simulator/test_rounds.py::test_constrained_texts_are_the_cpus": (
        "apart-graph",
        "one GPU-pieces",
        "CPU-graph",
        "suffix-pieces",
        "alone-graph",
    ),
    "gpu_simulator/test_rounds.py::test_ids_are_the_cpus": (
        "good-one GPU-graph",
        "noisy-the second-graph",
        "useless-apart-graph",
        "noisy-the other way-graph",
    ),
    "gpu_simulator/test_table_backend.py::test_ids_are_the_cpus": (
        "one GPU-graph",
        "good-the second-pieces",
        "good-apart-graph",
        "good-the other way-pieces",
        "none-the second-graph",
    ),
    "graph/test_used_experts.py::test_quantized_experts": ("int4",),
    "graph/test_used_experts.py::test_the_logits_are_those_of_transformers": ("mixtral",),
    "heads/test_dflash.py::test_logits_of_blocks": ("z-lab",),
    "heads/test_dflash.py::test_plans_write_back_what_they_read": ("z-lab",),
    "heads/test_dialects.py::test_features_of_other_targets": ("lfm2",),
    "heads/test_dialects.py::test_logits_along_a_chain": ("specforge, 3.1",),
    "heads/test_medusa.py::test_logits_of_all_heads": ("safetensors",),
    "heads/test_mtp.py::test_logits_along_a_chain": ("glm4_moe",),
    "heads/test_mtp.py::test_same_ids_as_the_target_alone": ("glm4_moe",),
    "kernels/test_kernels.py::test_compiles_for_gpus": ("sm_80",),
    "quantization/test_kv_cache.py::test_other_attention_in_16_bits": ("gpt_oss",),
    "quantization/test_kv_cache.py::test_scales_of_a_checkpoint_are_taken_over": ("fp8",),
    "quantize/test_experts.py::test_a_plan_rounds_the_inputs_of_experts": ("nvfp4",),
    "quantize/test_experts.py::test_convert_and_engine_take_what_quantize_wrote": ("mixtral",),
    "quantize/test_experts.py::test_verification_dequantizes_weights_in_slices": ("mixtral-int4",),
    "quantize/test_quantize.py::test_options_without_effect_are_said": ("int4", "auto"),
    "quantized_formats/test_checkpoints.py::test_tensorrt_compiles_every_format_for_the_gpus_that_have_it": (
        "nvfp4_wo",
    ),
    "sampling/test_penalties.py::test_control_penalties_that_do_not_know_the_drafts_are_seen": ("tokens",),
    "sampling/test_penalties.py::test_sampling_is_exact_with_penalties": ("all-logits",),
    "scheduler/test_draft_length.py::test_nor_on_a_machine_that_gets_faster_and_slower": (
        "0.0-0.03-0.03-4",
        "0.8-1.0-0.06-1",
    ),
    "scheduler/test_draft_length.py::test_times_that_are_no_straight_line": ("0.6-12-8", "0.9-12-1"),
    "scheduler/test_draft_length.py::test_within_five_percent_of_the_best_fixed_length": ("0.1", "0.03"),
    "scheduler/test_draft_length.py::test_no_kind_of_draft_is_slower_whether_it_is_good_or_useless": ("-1",),
    "speculative/test_lossless_sampling.py::test_accepting_tokens_gives_the_targets_own_seeded_output": (
        "1]",
        "4]",
        "10]",
    ),
    "speculative/test_lossless_sampling.py::test_greedy_is_the_same_with_either_acceptance": ("1]", "4]", "10]"),
    "speculative/test_lossless_sampling.py::test_narrow_with_a_draft_that_is_mostly_wrong": ("tokens",),
    "speculative/test_lossless_sampling.py::test_wide": ("logits",),
    "text/test_grammar.py::test_a_draft_changes_nothing_and_every_text_is_valid": ("seeded-draft", "greedy-suffix"),
    "text/test_grammar.py::test_a_draft_that_is_not_masked_changes_nothing": ("tokens",),
    "text/test_grammar.py::test_control_masks_that_do_not_know_the_drafts_are_seen": ("tokens",),
    "text/test_grammar.py::test_drawn_texts_have_the_distribution_of_masked_decoding": ("logits",),
}
"""Of a test with parameters: whose ids contain one of these strings stays in ``scripts/test``."""


def is_left_out(test: str) -> bool:
    """Whether ``scripts/test`` leaves out a test, named by its file in tests/, ``::``, its name and its parameters."""
    name, _, parameters = test.partition("[")
    if name.partition("::")[0] in FILES or name in TESTS:
        return True
    return name in KEPT and not any(kept in parameters for kept in KEPT[name])
