"""How large everything is that is measured."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """A dense decoder whose weights are random: only its times are of interest."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    gated: int
    vocab_size: int


@dataclass(frozen=True)
class Size:
    """Models, and what is measured with them."""

    target: str
    draft: str
    """Options of scripts/grow_checkpoint.py."""
    dtype: str = "float16"
    max_seq_len: int = 8192
    long_texts: tuple[int, ...] = (4096, 8192)
    """Tokens of long texts, prompt and all."""
    queued: int = 32
    """Requests that wait for the rows together."""
    max_input_len: int = 2048
    batches: tuple[int, ...] = (1, 2, 4, 8)
    sequences: tuple[int, ...] = (1, 2, 3, 5, 9, 11)
    prompts: tuple[int, ...] = (128, 512, 2048)
    vocabularies: tuple[int, ...] = (128_256, 32_000, 262_144, 2048)
    rows: tuple[int, ...] = (1, 4, 16)
    output_len: int = 96
    shapes: tuple[tuple[str, Shape], ...] = (
        ("8B", Shape(32, 4096, 32, 8, 128, 14336, 128_256)),
        ("1B", Shape(16, 2048, 32, 8, 64, 8192, 128_256)),
    )
    """Decoders for our own kernels: Llama 3.1 8B and Llama 3.2 1B."""
    captured: tuple[bool, ...] = (True, False)
    """Whether a pair's rounds are CUDA graphs: it is measured both ways."""
    repetitions: int = 3
    soak_rounds: int = 10_000
    cache_tensors: int = 64
    """Of the cache whose rows are moved."""
    copied_bytes: int = 1 << 30
    calls: int = 50
    """Of a kernel, in the graph that is timed."""
    empty_nodes: int = 1000
    tests: tuple[str, ...] = (
        *("tests/gpu/kernels/test_kernels.py", "tests/test_gpu_decoder.py"),
        *("tests/test_gpu.py", "tests/test_gpu_families.py"),
    )
    sanitized: tuple[tuple[str, ...], ...] = (
        ("tests/test_gpu.py", "-k", "tables"),
        ("tests/gpu/kernels/test_kernels.py", "-k", "mixed_rows or adjusted or commit or change_places"),
    )
    """pytest's arguments, for the runs under compute-sanitizer."""

    def quick(self) -> Size:
        """The same models, of which less is measured: each figure once, at the smallest and the largest size."""
        sequences = tuple(length for length in self.sequences if length in (1, 5))
        return replace(
            self,
            batches=_ends(self.batches),
            prompts=_ends(self.prompts),
            rows=_ends(self.rows),
            sequences=sequences or self.sequences[-1:],
            long_texts=self.long_texts[-1:],
            vocabularies=self.vocabularies[:1],
            captured=(True,),
            repetitions=1,
            soak_rounds=self.soak_rounds // 10,
        )

    @property
    def vocabulary(self) -> int:
        """Of tables; models are grown to theirs by their options."""
        return self.vocabularies[0]


def _ends(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys((values[0], values[-1])))


SIZES = {
    # As the small pair, and as quick: for trying out what this measures. Its figures mean nothing.
    "tiny": Size(
        target="--parameters 3M --vocab_size 2500",
        draft="--parameters 2M --vocab_size 2500",
        dtype="float32",
        max_seq_len=64,
        long_texts=(48,),
        queued=5,
        max_input_len=32,
        batches=(1, 2),
        sequences=(1, 3),
        prompts=(4, 16),
        vocabularies=(300, 40),
        rows=(1, 2),
        output_len=8,
        shapes=(("tiny", Shape(2, 32, 4, 2, 16, 32, 64)),),
        repetitions=1,
        soak_rounds=60,
        cache_tensors=2,
        copied_bytes=1 << 16,
        calls=2,
        empty_nodes=10,
        tests=("tests/gpu_simulator/test_cuda_device.py",),
        sanitized=(("tests/gpu_simulator/test_cuda_device.py", "-k", "caller"),),
    ),
    "demo": Size(
        target="--parameters 200M",
        draft="--parameters 5M",
        max_seq_len=1024,
        long_texts=(512, 1024),
        max_input_len=256,
        prompts=(128, 256),
    ),
    # Llama 3.1 8B and Llama 3.2 1B, with the small pair's 64 channels to a head.
    "8B": Size(
        target="--hidden_size 4096 --intermediate_size 14336 --num_layers 32 --num_heads 64 --num_kv_heads 16"
        " --vocab_size 128256 --max_position_embeddings 32768",
        draft="--hidden_size 2048 --intermediate_size 8192 --num_layers 16 --num_heads 32 --num_kv_heads 8"
        " --vocab_size 128256 --max_position_embeddings 32768",
    ),
}
