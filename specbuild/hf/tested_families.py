"""Families of models that every test run converts and compares with Hugging Face."""

TESTED = (
    *("apertus", "arcee", "bamba", "cohere", "cohere2", "deepseek_v2", "ernie4_5", "exaone4", "falcon_h1", "gemma"),
    *("gemma2", "gemma3_text", "gemma4_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite"),
    *(
        "granitemoe",
        "granitemoehybrid",
        "helium",
        "internlm3",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "llama",
        "llama4_text",
        "mistral",
    ),
    *("mixtral", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "opt", "phi", "phi3", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm"),
)
"""Values of ``model_type``, sorted."""
