"""Our GGUF parser against the gguf package's, and against damaged files."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from runtime.errors import ConfigError, ModelNotFound
from runtime.gguf_file import TENSOR_TYPES, GgufFile

_ROWS = np.arange(6 * 64, dtype=np.float32).reshape(6, 64) / 100


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A file with one value of every kind and tensors of three types."""
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.whole", 7)
    writer.add_int64("a.negative", -(2**40))
    writer.add_float32("a.real", 0.5)
    writer.add_float64("a.double", 1e-300)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "naïve ✓")
    writer.add_array("a.words", ["", "ab", "Ġthe", "…"])
    writer.add_array("a.numbers", [1, -2, 3])
    writer.add_array("a.reals", [0.25, 1.5])
    writer.add_array("a.flags", [True, False])
    writer.add_tensor("vector", np.arange(5, dtype=np.float32))
    writer.add_tensor("half", _ROWS.astype(np.float16))
    packed = gguf.quants.quantize(_ROWS, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_equals_the_gguf_packages(small: Path) -> None:
    ours, theirs = GgufFile(small), gguf.GGUFReader(small)
    names = [name for name in theirs.fields if not name.startswith("GGUF.")]
    assert list(ours.metadata) == names
    for name in names:
        value = ours.metadata[name]
        plain = value.tolist() if isinstance(value, np.ndarray) else value
        assert plain == theirs.fields[name].contents()
    assert ours.metadata["a.words"] == ["", "ab", "Ġthe", "…"]
    assert ours.metadata["a.flag"] is True


def test_tensors_equal_the_gguf_packages(small: Path) -> None:
    ours, theirs = GgufFile(small), gguf.GGUFReader(small)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(n) for n in tensor.shape[::-1])
        assert (mine.type_id, mine.type_name) == (tensor.tensor_type, tensor.tensor_type.name)
        kind = gguf.GGMLQuantizationType(mine.type_id)
        expected = gguf.quants.dequantize(tensor.data, kind)
        np.testing.assert_array_equal(gguf.quants.dequantize(mine.data, kind), expected)
        assert not mine.data.flags.writeable


def test_block_sizes_equal_the_gguf_packages() -> None:
    for type_id, (name, block_len, block_bytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(type_id)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (block_len, block_bytes))


def test_every_truncation_is_an_error_that_names_the_file(small: Path, tmp_path: Path) -> None:
    whole, cut = small.read_bytes(), tmp_path / "cut.gguf"
    packed = GgufFile(small).tensors["packed"]
    needed = whole.rindex(packed.data.tobytes()) + packed.data.nbytes
    for length in [*range(0, min(needed, 1500), 3), *range(1500, needed, 41), needed - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf is not a usable GGUF file"):
            GgufFile(cut)
    cut.write_bytes(whole[:needed])
    assert GgufFile(cut).tensors["packed"].shape == (6, 64)


@pytest.mark.parametrize(
    ("head", "told"),
    [
        (b"PK\x03\x04" + bytes(40), "starts with"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "version is 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "tensors to come"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "unknown value type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 0), "unknown value type 9"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9) + bytes(99), "9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 4, 77, 0), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 4, 2, 0), "whole Q4_0 blocks"),
    ],
)
def test_a_foreign_file_is_told_what_is_wrong(tmp_path: Path, head: bytes, told: str) -> None:
    path = tmp_path / "foreign.gguf"
    path.write_bytes(head)
    with pytest.raises(ConfigError, match=told):
        GgufFile(path)


def test_a_missing_file_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none\.gguf can't be read: No such file"):
        GgufFile(tmp_path / "none.gguf")
