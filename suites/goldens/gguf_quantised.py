"""Make the GGUF golden with ggml's own C code, or check the stored one.

    python -m mla_conformance.suites.goldens.gguf_quantised --check    (or --write)

Needs the package `ggml-python`, which brings ggml's libraries: 0.0.45 has ggml 0.15.3, whose sources were last
brought in line with llama.cpp at ded1561b4228 (the library itself says of its commit only "unknown").

Weights are drawn from integers, so that they are the same on every machine, and quantised by ggml's quantisers; what
ggml's dequantisers make of the bytes is stored too.

Tensors in the file: `source`, and `source.ternary` for the formats made for weights that are ternary already;
`importance`, the weight of each column that some quantisers insist on; and for every format `<name>.quantised` and
`<name>.dequantised`.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from mla_conformance.suites.goldens import FOLDER, GoldenError
from mla_conformance.suites.goldens.comparison import describe_differences

NAME = "gguf_quantised"
PATH = FOLDER / f"{NAME}.safetensors"
SEED = 401
ROWS, COLUMNS = 2, 512
VERSION_KEYS = ("torch",)

QUANTS = (
    *("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q1_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
TERNARY = ("TQ1_0", "TQ2_0")

ONE_AND_NO_MINIMUM = bytes.fromhex("003c0000")
"""The first fields of a Q4_1 block: the halves 1.0 and 0.0."""


class Ggml:
    """The functions of ggml that the suite compares with, on tensors."""

    def __init__(self) -> None:
        """Load ggml.

        Raises:
            GoldenError: if `ggml-python` is not installed.

        """
        try:
            self._ggml: ModuleType = importlib.import_module("ggml")
        except ImportError as error:
            raise GoldenError(f"ggml cannot be imported ({error}); install ggml-python 0.0.45") from error
        libraries = Path(str(self._ggml.__file__)).parent / "lib"
        self._base = ctypes.CDLL(str(libraries / "libggml-base.so"))
        self._cpu = ctypes.CDLL(str(libraries / "libggml-cpu.so"))
        # These fill the two libraries' conversion tables of float16.
        self._ggml.ggml_free(self._ggml.ggml_init(self._ggml.ggml_init_params(mem_size=1 << 16, no_alloc=True)))
        self._cpu.ggml_cpu_init()

    def version(self) -> str:
        """Return ggml's own version."""
        self._base.ggml_version.restype = ctypes.c_char_p
        return str(self._base.ggml_version().decode())

    def type_id(self, quant: str) -> int:
        """Return the number of a type."""
        return int(getattr(self._ggml, f"GGML_TYPE_{quant}"))

    def block_size(self, quant: str) -> tuple[int, int]:
        """Return the elements and the bytes of a block."""
        kind = self.type_id(quant)
        return int(self._ggml.ggml_blck_size(kind)), int(self._ggml.ggml_type_size(kind))

    def needs_importance(self, quant: str) -> bool:
        """Return whether the quantiser refuses to work without an importance matrix."""
        return bool(self._ggml.ggml_quantize_requires_imatrix(self.type_id(quant)))

    def quantise(self, quant: str, source: Tensor, importance: Tensor) -> Tensor:
        """Quantise float32 [rows, columns]: uint8 [rows, row_bytes]. Importance [columns] is used where needed."""
        kind, (elements, size) = self.type_id(quant), self.block_size(quant)
        rows, columns = source.shape
        out = torch.zeros(rows, columns // elements * size, dtype=torch.uint8)
        if quant in ("Q8_1", "Q8_K"):
            # ggml_quantize_chunk leaves these two out, because no file stores them.
            quantiser = self._base[f"quantize_row_{quant.lower().replace('_k', '_K')}_ref"]
            quantiser(_pointer(source), _pointer(out), ctypes.c_int64(source.numel()))
            return out
        weights = _floats(importance) if self.needs_importance(quant) else None
        written = self._ggml.ggml_quantize_chunk(kind, _floats(source), _pointer(out), 0, rows, columns, weights)
        if written != out.numel():
            raise GoldenError(f"ggml_quantize_chunk wrote {written} bytes of {quant}, not {out.numel()}")
        return out

    def dequantise(self, quant: str, data: Tensor) -> Tensor:
        """Dequantise contiguous uint8 [rows, row_bytes]: float32 [rows, columns]."""
        elements, size = self.block_size(quant)
        out = torch.full((data.shape[0], data.shape[1] // size * elements), torch.nan)
        if quant == "F32":
            return data.view(torch.float32).clone()
        if quant == "Q8_1":
            return self._dequantise_q8_1(data)
        if quant == "Q8_K":
            self._base.dequantize_row_q8_K(_pointer(data), _pointer(out), ctypes.c_int64(out.numel()))
            return out
        traits = self._ggml.ggml_get_type_traits(self.type_id(quant)).contents
        traits.to_float(_pointer(data), _floats(out), out.numel())
        return out

    def _dequantise_q8_1(self, data: Tensor) -> Tensor:
        """Read the numbers through dot products with the unit vectors, each a Q4_1 block: ggml has no other way.

        A dot product adds d * q to zeros, which loses the sign of a -0 and nothing else.
        """
        blocks, units = data.reshape(-1, 36), torch.zeros(32, 20, dtype=torch.uint8)
        units[:, :4] = torch.tensor(list(ONE_AND_NO_MINIMUM), dtype=torch.uint8)
        for element in range(32):
            units[element, 4 + element % 16] = 1 if element < 16 else 16
        out = torch.full((blocks.shape[0], 32), torch.nan)
        dot, zero = self._cpu.ggml_vec_dot_q4_1_q8_1_generic, ctypes.c_size_t(0)
        for number, block in enumerate(blocks):
            for element in range(32):
                result = out[number, element]
                dot(32, _pointer(result), zero, _pointer(units[element]), zero, _pointer(block), zero, 1)
        return out.reshape(data.shape[0], -1)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _floats(tensor: Tensor) -> Any:
    return ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))


def sources() -> dict[str, Tensor]:
    """Draw the weights: near normal as sums of twelve integers, and ternary ones with a scale a row."""
    rng = torch.Generator().manual_seed(SEED)
    dice = torch.randint(-(2**11), 2**11, (ROWS, COLUMNS, 12), generator=rng)
    scales = torch.tensor([[0.75], [-0.03125]])
    return {
        "source": dice.sum(dim=2).float() / 2**11 / 2,
        "source.ternary": torch.randint(-1, 2, (ROWS, COLUMNS), generator=rng).float() * scales,
        "importance": torch.randint(2**8, 2**12, (COLUMNS,), generator=rng).float() / 2**10,
    }


def generate() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Run ggml's quantisers and dequantisers; return the tensors and their provenance."""
    ggml = Ggml()
    tensors = sources()
    for quant in QUANTS:
        source = tensors["source.ternary" if quant in TERNARY else "source"]
        quantised = ggml.quantise(quant, source, tensors["importance"])
        tensors[f"{quant}.quantised"] = quantised
        tensors[f"{quant}.dequantised"] = ggml.dequantise(quant, quantised)
    provenance = {
        "generator": "ggml.ggml_quantize_chunk",
        "ggml": ggml.version(),
        "ggml_python": version("ggml-python"),
        "torch": torch.__version__,
        "seed": SEED,
        "config": {
            "rows": ROWS,
            "columns": COLUMNS,
            "importance": [quant for quant in QUANTS if ggml.needs_importance(quant)],
            "without_quantize_chunk": {
                "Q8_1": "quantize_row_q8_1_ref, read back by ggml_vec_dot_q4_1_q8_1_generic with unit vectors",
                "Q8_K": "quantize_row_q8_K_ref, read back by dequantize_row_q8_K",
            },
        },
    }
    return tensors, provenance


def to_bytes(tensors: dict[str, Tensor], provenance: dict[str, Any]) -> bytes:
    """Serialise the golden. One metadata entry only: safetensors writes several in random order."""
    return tensors_to_bytes(tensors, metadata={"provenance": json.dumps(provenance, sort_keys=True)})


def provenance_entry(provenance: dict[str, Any], content: bytes) -> str:
    """Return the golden's section for provenance.toml."""
    entries = {key: value for key, value in provenance.items() if key != "config"}
    entries["sha256"] = hashlib.sha256(content).hexdigest()
    # A JSON string or integer is a TOML one too.
    return "\n".join([f"[{NAME}]", *(f"{key} = {json.dumps(value)}" for key, value in entries.items())]) + "\n"


def differences() -> list[str]:
    """Regenerate the golden in memory and describe every way in which the stored file differs, bit by bit."""
    if not PATH.is_file():
        return [f"{PATH.name} is not there; run gguf_quantised.py --write"]
    tensors, provenance = generate()
    content = PATH.read_bytes()
    stored, stored_provenance = tensors_from_bytes(content), read_provenance(content)
    return describe_differences(stored, stored_provenance, tensors, provenance, VERSION_KEYS)


def read_provenance(content: bytes) -> dict[str, Any]:
    """Return the provenance that lies in the header of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    return dict(json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["provenance"]))


def main() -> int:
    """Return 0 if all is well, 1 if the golden differs, 2 if ggml is not installed."""
    parser = argparse.ArgumentParser(description="Make or check the GGUF golden.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare the stored golden with a fresh one")
    action.add_argument("--write", action="store_true", help="replace the stored golden and print its entry")
    arguments = parser.parse_args()
    try:
        if arguments.write:
            tensors, provenance = generate()
            content = to_bytes(tensors, provenance)
            PATH.write_bytes(content)
            print(provenance_entry(provenance, content))
            return 0
        found = differences()
    except GoldenError as error:
        print(error, file=sys.stderr)
        return 2
    for line in found:
        print(f"{PATH.name}: {line}")
    print(f"1 golden checked, {len(QUANTS)} formats, {len(found)} differences")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
