"""Parity: the exported graph in ONNX Runtime against what the model it came from says (``reference.py``).

Two rows walk through prefill, one token, several tokens and different write indices, over a cache full of junk; a
third one behind a long text, where the model has one. The graph runs in pieces, one after another, all steps through
one piece before the next is loaded: no more of the weights is in memory than a piece has. 16-bit graphs are compared in
float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from specbuild.export.reference import SLICE, Floats, Reference, finite, made_up_cache
from specbuild.graph.kv_cache_qdq import drop_cache_rounding
from specbuild.graph.ops import drop_activation_rounding, widen_to_float32
from specbuild.graph.recurrent import Operators, inline
from specbuild.graph.split import Piece, cut, split_products
from specbuild.weights.kv_cache import CacheRounding
from specrun.backends.ort import session_options
from specrun.engine_dir.cache_tensors import LEAST_REPLAYS
from specrun.engine_dir.config import GraphInfo
from specrun.engine_dir.contract import INPUT_IDS, KEEP_INDICES, LOGITS, LOGITS_INDICES, STATE_INDICES, WRITE_INDICES
from specrun.engine_dir.dtypes import DTYPES
from specrun.errors import VerificationError

_PIECE = 64 << 20
"""Bytes of weights that are loaded at a time."""


def compare(
    graph: Path,
    info: GraphInfo,
    references: Sequence[Reference],
    rounding: CacheRounding | None = None,
    tokens: npt.NDArray[np.int64] | None = None,
) -> float:
    """Largest absolute logit difference between ``graph`` and ``references``. rounding: of the graph's cache.

    tokens: the only ones that the graph has logits of; None: it has all.
    Raises VerificationError when it exceeds the dtype's tolerance times the largest logit, or logits are not finite.
    """
    model = ir.load(graph)
    for drop in (drop_activation_rounding, drop_cache_rounding):
        drop(model)  # Rounding makes differences in the last bits large.
    inline(model, Operators.ONNX_RUNTIME)
    split_products(model, SLICE)
    widen_to_float32(model)
    walks = [_Walk(info, reference, rounding, tokens) for reference in references]
    for piece in cut(model, _PIECE):
        session = open_piece(piece, graph)
        for walk in walks:
            walk.run(piece, session)
        del session  # And with it, the weights.
    return max(_judge(walk, info) for walk in walks)


def _judge(walk: _Walk, info: GraphInfo) -> float:
    tolerance = DTYPES[info.dtype].tolerance
    where = f" behind {walk.reference.start} tokens" if walk.reference.start else ""
    differences = {
        LOGITS: walk.difference(),
        **({"features": walk.feature_difference()} if walk.features is not None else {}),
    }
    for what, (difference, scale) in differences.items():
        if not difference <= tolerance * scale:
            raise VerificationError(
                f"the exported graph and the model disagree{where}: largest {what} difference {difference:.3g}, "
                f"expected at most {tolerance * scale:.3g} ({tolerance:g} of the largest); "
                "please report the model, --no-verify skips the check"
            )
    return differences[LOGITS][0]


class _Walk:
    """The steps of one reference through the pieces of a graph."""

    def __init__(
        self,
        info: GraphInfo,
        reference: Reference,
        rounding: CacheRounding | None,
        tokens: npt.NDArray[np.int64] | None = None,
    ) -> None:
        self.info, self.reference, self.rounding = info, reference, rounding
        self.tokens = np.arange(info.vocab_size) if tokens is None else tokens
        self.values: list[dict[str, npt.NDArray[Any]]] = []
        """Values that pieces which ran have left for later pieces, one dict for each step."""
        self.starts: list[npt.NDArray[np.int64]] = []
        """Number of tokens read before each step, [B] for each step."""
        self.features: Floats | None = None
        """[B, 1, length, width]: what the steps have written, where it is to be compared."""
        done = read = np.zeros(len(reference.tokens), np.int64)
        for number, step in enumerate(reference.steps):
            ids = np.zeros((len(step), max(step)), np.int64)
            for row, new in enumerate(step):
                ids[row, :new] = reference.tokens[row, done[row] : done[row] + new]
            indices = np.tile(np.arange(max(step)), (len(step), 1))
            self.values.append({INPUT_IDS: ids, WRITE_INDICES: reference.start + done, LOGITS_INDICES: indices})
            self.starts.append(done)
            # Recurrent layers read what a step brings for good, or again in the next step.
            kept = done + (0 if number % 2 else np.array(step))
            self.values[-1] |= {STATE_INDICES: read, KEEP_INDICES: kept}
            done, read = done + np.array(step), kept

    def run(self, piece: Piece, session: Any) -> None:
        """Run every step through one piece. The piece's layers' cache goes from step to step."""
        names = self.info.past_names
        cache = {name: self._cache(name) for name in names if name in piece.inputs}
        pasts = dict(zip(self.info.present_names, names, strict=True))
        for state in self.info.states:
            pasts[state.present_name] = state.past_name
            if state.past_name in piece.inputs:
                shape = (len(self.reference.tokens), *state.row_shape(LEAST_REPLAYS))
                cache[state.past_name] = np.zeros(shape, np.float32)
        for values in self.values:
            feeds = {name: cache[name] if name in cache else values[name] for name in piece.inputs}
            computed = dict(zip(piece.outputs, session.run(piece.outputs, feeds), strict=True))
            cache |= {past: computed[present] for present, past in pasts.items() if present in computed}
            values |= computed
            for name in values.keys() - piece.later - {LOGITS}:
                del values[name]
        if self.reference.features is not None:
            self.features = cache.get(names[-1], self.features)

    def _cache(self, name: str) -> Floats:
        rows, total = self.reference.tokens.shape
        length = self.reference.start + total + 16
        number = self.info.past_names.index(name)
        if self.reference.start and number < len(self.info.caches):
            values = made_up_cache(self.info, self.reference, name, length)
            return values / self.rounding.tensors[number].factors[:, None] if self.rounding else values
        shape = self.info.cache_tensors[number]
        # Junk where nothing was written yet: whatever the mask lets through shows up in the logits.
        return np.full((rows, shape.heads, length, shape.head_dim), 1e3, np.float32)

    def difference(self) -> tuple[float, float]:
        """The largest difference of logits, and the largest logit. Raises VerificationError."""
        pairs, scale = [], 0.0
        for step, starts, values in zip(self.reference.steps, self.starts, self.values, strict=True):
            for row, new in enumerate(step):
                expected = self.reference.logits[row, starts[row] : starts[row] + new]
                logits = values[LOGITS][row, :new]
                checked = finite(logits[:, self.tokens], f"the exported graph's {LOGITS}")
                if np.isfinite(logits).sum() != checked.size:
                    raise VerificationError(f"the graph has {LOGITS} of other tokens than it should have")
                pairs.append((checked, expected[:, self.tokens]))
                scale = max(scale, float(np.abs(expected).max()))
        return largest_difference(pairs)[0], scale

    def feature_difference(self) -> tuple[float, float]:
        """The same of features. Raises VerificationError."""
        expected, actual = self.reference.features, self.features
        assert expected is not None and actual is not None
        return largest_difference(
            (finite(actual[row, 0, :total], "the exported graph's features"), expected[row, :total])
            for row, total in enumerate(np.sum(self.reference.steps, axis=0))
        )


def largest_difference(pairs: Iterable[tuple[Floats, Floats]]) -> tuple[float, float]:
    """The largest absolute difference of two arrays, and the largest number of the second ones."""
    maxima = [(np.abs(actual - expected).max(), np.abs(expected).max()) for actual, expected in pairs]
    worst, scale = np.max(maxima, axis=0)
    return float(worst), float(scale)


def open_piece(piece: Piece, graph: Path) -> Any:
    """A session on a piece, whose weights lie in ``graph``'s file. Raises VerificationError."""
    for tensor in piece.model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT4E2M1:  # ONNX Runtime dequantizes float8 alone on a processor.
            codes = ir.serde.deserialize_tensor(tensor, graph.parent).numpy().astype(ml_dtypes.float8_e4m3fn)
            tensor.CopyFrom(ir.serde.serialize_tensor(ir.Tensor(codes, name=tensor.name)))
    ort, options = session_options()
    # Weights stay mapped from the file: no optimized copies, no packed copies, no arena that keeps temporaries.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.enable_cpu_mem_arena = False
    # In file order. Otherwise all casts of 16-bit weights run first and stand in memory as float32 at once.
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
    try:
        return ort.InferenceSession(piece.model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base class.
        raise VerificationError(f"ONNX Runtime {ort.__version__} does not load the exported graph: {error}") from error
