"""GGUF's blocks as ``Packed``: the numbers of ggml's own package, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from specbuild.quantized_formats.formats import Form
from specbuild.quantized_formats.unpack.readers import READERS
from specbuild.quantized_formats.unpack.stored import Index, Module
from specbuild.weights.gguf_file import BLOCKS
from specbuild.weights.packed import Packed
from specrun.errors import CheckpointError
from tests.helpers.gguf_files import blocks_of, dequantized

pytest.importorskip("gguf", reason="the package gguf is not installed")

INPUTS, OUTPUTS = 768, 40


class Stored:
    """Blocks as a file has them."""

    name = "m.gguf"
    dtype = np.dtype(np.uint8)

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self.data, self.shape = data, data.shape

    def read(self, index: Index = ()) -> npt.NDArray[Any]:
        return self.data[index]


def packed(kind: str, data: npt.NDArray[np.uint8], heads: int = 0, is_table: bool = False) -> Packed:
    form = Form(kind, 4, (1, None), heads=heads, is_table=is_table)
    return READERS[kind](Module(Path("config.json"), "m", {"gguf": Stored(data)}), form)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("is_table", [False, True])
def test_numbers_are_the_same_to_the_bit(kind: str, is_table: bool) -> None:
    data = blocks_of(kind, (OUTPUTS, INPUTS))
    found, wanted = packed(kind, data, is_table=is_table).dequantize(), dequantized(kind, data)
    np.testing.assert_array_equal(found if is_table else found.T, wanted)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K"])
def test_parts_are_read_alike(kind: str) -> None:
    """Of channels, and of rows that begin within a block, as codes are written."""
    data = blocks_of(kind, (OUTPUTS, INPUTS))
    own = packed(kind, data)
    np.testing.assert_array_equal(own.dequantize(slice(7, 19)), dequantized(kind, data).T[:, 7:19])
    codes: Any = own.codes
    whole = np.concatenate(list(codes._rows([(0, INPUTS)])))
    np.testing.assert_array_equal(np.concatenate(list(codes._rows([(0, 64), (64, 320), (320, INPUTS)]))), whole)


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_heads_are_in_halves_again(kind: str) -> None:
    data, heads = blocks_of(kind, (OUTPUTS, INPUTS)), 5
    halves = torch.from_numpy(dequantized(kind, data)).unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    np.testing.assert_array_equal(packed(kind, data, heads=heads).dequantize().T, halves.numpy())


def test_a_scale_that_is_no_number_is_an_error() -> None:
    data = blocks_of("Q4_K", (OUTPUTS, INPUTS))
    data[3, :2] = np.array([np.nan], "<f2").view(np.uint8)
    with pytest.raises(CheckpointError, match=r"the values of m.gguf are not finite"):
        packed("Q4_K", data).dequantize()


def test_rows_that_are_no_blocks_are_an_error() -> None:
    with pytest.raises(CheckpointError, match="is not of type Q4_K"):
        packed("Q4_K", blocks_of("Q4_K", (OUTPUTS, INPUTS))[:, :-1])
