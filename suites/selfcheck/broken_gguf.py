"""Planted faults of dequantisation and of products with a quantised matrix: the reference with one thing wrong each."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor

from mla_conformance.reference import fused_linear
from mla_conformance.reference.gguf import FORMATS, dequantize, grids
from mla_conformance.reference.matmul_tolerance import MatmulArithmetic
from mla_conformance.suites.harness.gguf_cases import DequantizeCase, MatmulCase
from mla_conformance.suites.harness.problems import GGUFLinearProblem, GGUFMatmulProblem
from mla_conformance.suites.selfcheck.broken import Broken
from mla_conformance.suites.selfcheck.broken_more import one_step_up


def taken_as_dense(matrix: Tensor) -> Tensor:
    """The matrix that lies where ``matrix`` begins, if rows had no gaps between them."""
    return matrix.as_strided(matrix.shape, (matrix.shape[1], 1), matrix.storage_offset())


class ReadsOtherBlocks(Broken):
    """What reads a field of a block wrongly: right for a block in which the field is changed."""

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Right, for other blocks."""
        form, data = FORMATS[case.problem.quant], case.data.clone()
        self.change(data.view(-1, form.block_bytes))
        return super().gguf_dequantize(dataclasses.replace(case, data=data))

    def change(self, blocks: Tensor) -> None:
        """Change uint8 [blocks, block_bytes] in place."""
        raise NotImplementedError


class NibblesSwapped(ReadsOtherBlocks):
    """Takes the high nibbles of Q4_0 for the first sixteen numbers."""

    name = "nibbles-swapped"

    def change(self, blocks: Tensor) -> None:
        blocks[:, 2:] = blocks[:, 2:] >> 4 | blocks[:, 2:] << 4


class SubnormalFactorsAreZero(ReadsOtherBlocks):
    """A float16 factor below the normal numbers is read as zero of its sign (Q8_0)."""

    name = "subnormal-factors-are-zero"

    def change(self, blocks: Tensor) -> None:
        blocks[blocks[:, 1] & 0x7C == 0, :2] &= torch.tensor([0, 0x80], dtype=torch.uint8)


class RoundsTwice(Broken):
    """Rounds to float16 on the way to bfloat16."""

    name = "rounds-twice"

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Right for float16."""
        return case.out.copy_(dequantize(case.data, case.problem.quant).half())


class RoundsTheFactor(ReadsOtherBlocks):
    """Rounds Q8_0's factor to bfloat16 and multiplies afterwards: arithmetic in the narrow type."""

    name = "rounds-the-factor"

    def change(self, blocks: Tensor) -> None:
        blocks[:, :2] = blocks[:, :2].contiguous().view(torch.float16).bfloat16().half().view(torch.uint8)


class WrongGrid(Broken):
    """Reads a code book in which something is wrong."""

    grid: ClassVar[str]
    wrong: ClassVar[dict[str, Any]]

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Right, for another code book."""
        with mock.patch.object(grids, self.grid, getattr(grids, self.grid)._replace(**self.wrong)):
            return super().gguf_dequantize(case)


class TopOfIQ3SIsFifteenAndAHalf(WrongGrid):
    """Takes 15.5 for 15, the largest number of IQ3_S's code book."""

    name, grid = "top-of-iq3-s-is-fifteen-and-a-half", "IQ3_S"
    wrong: ClassVar = {"values": (*grids.IQ3_S.values[:-1], 15.5)}


class OneRowOfIQ2XSWrong(WrongGrid):
    """The first of IQ2_XS's 512 rows, sixteen bits of the packed code book, has 25 for 8."""

    name, grid = "one-row-of-iq2-xs-wrong", "IQ2_XS"
    wrong: ClassVar = {"packed": "VVUC" + grids.IQ2_XS.packed[4:]}


class ReadsDenseRows(Broken):
    """Takes row_bytes for the distance between rows of blocks, and the columns for that between activations."""

    name = "reads-dense-rows"

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Right where rows are dense."""
        return super().gguf_dequantize(dataclasses.replace(case, data=taken_as_dense(case.data)))

    def gguf_matmul(self, case: MatmulCase) -> Tensor:
        """Right where activations are dense; what it finds between them is poison."""
        return super().gguf_matmul(dataclasses.replace(case, x=taken_as_dense(case.x)))


class LeavesTheLastRow(Broken):
    """The last row is never stored."""

    name = "leaves-the-last-row"

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Right in the other rows."""
        before = case.out[-1:].clone()
        super().gguf_dequantize(case)
        case.out[-1:] = before
        return case.out


class WritesAByteBeside(Broken):
    """Writes the byte after the end of the first row."""

    name = "writes-a-byte-beside"

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Right in every row."""
        end = (case.out.storage_offset() + case.out.shape[1]) * case.out.element_size()
        super().gguf_dequantize(case).untyped_storage()[end] = 0x55
        return case.out


class ReturnsAnotherMatrix(Broken):
    """Leaves the caller's output as it was and returns a fresh tensor: a phantom output."""

    name = "returns-another-matrix"

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Right numbers, in the wrong place."""
        return super().gguf_dequantize(dataclasses.replace(case, out=torch.empty_like(case.out)))


class RowOffsetsOf32Bits(Broken):
    """The offset of a row in bytes wraps at 2**31: such rows are read from the first."""

    name = "row-offsets-of-32-bits"

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Right where every row starts below that."""
        rows = torch.arange(len(case.data))
        rows[rows * case.data.stride(0) >= 2**31] = 0
        return super().gguf_dequantize(dataclasses.replace(case, data=case.data[rows]))


class LargestE8M0IsNaN(Broken):
    """Code 255 of MXFP4's scale is NaN, as the OCP standard has it."""

    name = "largest-e8m0-is-nan"

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Right for the other codes."""
        out, form = super().gguf_dequantize(case), FORMATS[case.problem.quant]
        out[(case.data[:, :: form.block_bytes] == 255).repeat_interleave(form.block_elements, 1)] = torch.nan
        return out


class Q81InFortyBytes(Broken):
    """Looks for a block of Q8_1 every 40 bytes."""

    name = "q8-1-in-forty-bytes"

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Right in the first block."""
        size = case.data.shape[1]
        places = (torch.arange(size // 36)[:, None] * 40 + torch.arange(36)).clamp_max(size - 1)
        return super().gguf_dequantize(dataclasses.replace(case, data=case.data[:, places.flatten()]))


class BlocksInFours(Broken):
    """A row's blocks beyond the last whole four are zeros."""

    name = "blocks-in-fours"

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Right for a multiple of four blocks."""
        out = super().gguf_dequantize(case)
        out[:, out.shape[1] - out.shape[1] % (4 * FORMATS[case.problem.quant].block_elements) :] = 0
        return out


class RowsOfOneTile(Broken):
    """Rows beyond a tile of 16 are zeros."""

    name = "rows-of-one-tile"

    def gguf_dequantize(self, case: DequantizeCase) -> Tensor:
        """Right up to 16 rows."""
        out = super().gguf_dequantize(case)
        out[16:] = 0
        return out

    def gguf_matmul(self, case: MatmulCase) -> Tensor:
        """Right up to 16 rows of the matrix."""
        out = super().gguf_matmul(case)
        out[:, 16:] = 0
        return out


class Multiplies(Broken):
    """Multiplies other numbers than it was given."""

    def gguf_matmul(self, case: MatmulCase) -> Tensor:
        """Right, for other operands."""
        x, weight = self.change(case.x.double(), dequantize(case.data, case.problem.quant).double(), case.problem)
        return case.out.copy_(fused_linear.linear(x, weight))

    def change(self, x: Tensor, weight: Tensor, problem: GGUFMatmulProblem) -> tuple[Tensor, Tensor]:
        """Return the other operands, for x [tokens, columns] and W [rows, columns] in float64."""
        raise NotImplementedError


class OneFactorOnePercentOff(Multiplies):
    """The factor of the first row's first block is 1 % too large."""

    name = "one-factor-one-percent-off"

    def change(self, x: Tensor, weight: Tensor, problem: GGUFMatmulProblem) -> tuple[Tensor, Tensor]:
        weight[0, : FORMATS[problem.quant].block_elements] *= 1.01
        return x, weight


class DropsTheLastBlock(Multiplies):
    """The last block of every row is left out of the sum."""

    name = "drops-the-last-block"

    def change(self, x: Tensor, weight: Tensor, problem: GGUFMatmulProblem) -> tuple[Tensor, Tensor]:
        weight[:, -FORMATS[problem.quant].block_elements :] = 0
        return x, weight


class EightBitActivations(Multiplies):
    """Rounds activations to 8 bits, as q8_1 has them, and declares that it rounds none."""

    name = "eight-bit-activations"

    def change(self, x: Tensor, weight: Tensor, problem: GGUFMatmulProblem) -> tuple[Tensor, Tensor]:
        blocks = x.view(len(x), -1, 32)
        steps = blocks.abs().amax(2, keepdim=True) / 127
        return (blocks / steps).round().mul(steps).view(x.shape), weight


class DeclaresAnotherArithmeticBeyondEight(Broken):
    """Says that it rounds activations to 8 bits up to 8 tokens, and not beyond."""

    name = "declares-another-arithmetic-beyond-eight"

    def matmul_arithmetic(self, problem: GGUFMatmulProblem | GGUFLinearProblem) -> MatmulArithmetic:
        """True of its results in both cases, but not one arithmetic."""
        few = "q8_1" if problem.tokens <= 8 else "float64"
        return dataclasses.replace(super().matmul_arithmetic(problem), activations=few)


class RoundsWeightsBeyondEight(Multiplies):
    """Beyond 8 tokens weights are rounded to bfloat16, which it does not declare."""

    name = "rounds-weights-beyond-eight"

    def change(self, x: Tensor, weight: Tensor, problem: GGUFMatmulProblem) -> tuple[Tensor, Tensor]:
        return x, weight.bfloat16().double() if problem.tokens > 8 else weight


class Float32InBfloat16(Multiplies):
    """float32 activations are rounded to bfloat16."""

    name = "float32-in-bfloat16"

    def change(self, x: Tensor, weight: Tensor, problem: GGUFMatmulProblem) -> tuple[Tensor, Tensor]:
        return x.bfloat16().double() if problem.dtype == "float32" else x, weight


class TokensSeeTheirNeighbours(Broken):
    """The last bit of a result is another where a token is not alone."""

    name = "tokens-see-their-neighbours"

    def gguf_matmul(self, case: MatmulCase) -> Tensor:
        """Right for one token."""
        out = super().gguf_matmul(case)
        return out.copy_(one_step_up(out)) if len(out) > 1 else out
