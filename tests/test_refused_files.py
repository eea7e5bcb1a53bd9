"""Every refusal of a file that is no sound safetensors file in an adapter's folder."""

from __future__ import annotations

import os
import pickle
import zipfile

import pytest
import torch

from checkpoints import assert_refused, factors, llama_spec, refusal, safetensors_bytes, write
from loramux.checkpoint import read_adapter_info, read_lora_file

ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
ANEW = "download or export the file anew"
SAVE = ("safetensors", "re-save the adapter as safetensors")


def with_entry(*data: bytes, **fields: object) -> bytes:
    return safetensors_bytes({"a": {**ENTRY, **fields}}, *data or [b"0" * 4])


@pytest.mark.parametrize(
    ("content", "found", "expected", "remedy"),
    [
        (b"", "a header of 0 bytes", "at most 16777216", ANEW),
        (b"\x08", "is not safetensors", "at most 16777216", ANEW),
        ((1 << 30).to_bytes(8, "little") + b"{", "1073741824 bytes", "at most 16777216", ANEW),
        ((1 << 63).to_bytes(8, "little") + b"{", "is not safetensors", "at most 16777216", ANEW),
        ((20).to_bytes(8, "little") + b"{}", "20 bytes starting b'{' in a file of 10", "at", ANEW),
        (safetensors_bytes(b"[]"), "starting b'['", "start with b'{'", ANEW),
        (safetensors_bytes(b'{"a":' + b"[" * 10_000), "nested too deep", "JSON", ANEW),
        (safetensors_bytes(b'{"a":1,"a":2}'), "the key 'a' twice", "JSON", ANEW),
        (
            safetensors_bytes(b'{"__metadata__":{"a":"\\uD800"}}'),
            "a string that is no Unicode",
            "JSON",
            ANEW,
        ),
        (safetensors_bytes(b'{"a":'), "malformed JSON", "JSON", ANEW),
        (safetensors_bytes(b"{\xff}"), "bytes that are no UTF-8 (at ", "JSON", ANEW),
        (safetensors_bytes("{}".encode("utf-16-le")), "malformed JSON", "JSON", ANEW),
        (safetensors_bytes({"a": 3}), "'a' has the entry 3", "dtype, shape and", ANEW),
        (safetensors_bytes({"__metadata__": {"a": 1}}), "is {'a': 1}", "strings by name", ANEW),
        (safetensors_bytes({"__metadata__": []}), "is []", "strings by name", ANEW),
        (with_entry(dtype="F8_E4M3"), "'a' has dtype 'F8_E4M3'", "BF16", ANEW),
        (with_entry(dtype=[1]), "'a' has dtype '[1]'", "BF16", ANEW),
        (with_entry(shape=[-1]), "'a' has [-1]", "whole numbers", ANEW),
        (with_entry(shape=[1.0]), "'a' has [1.0]", "whole numbers", ANEW),
        (with_entry(shape=[True]), "'a' has [True]", "whole numbers", ANEW),
        (with_entry(shape=[10**40]), "'a' has [1000000000", "whole numbers", ANEW),
        (with_entry(shape=[2]), "'a' has data_offsets [0, 4]", "the 8 bytes of shape [2]", ANEW),
        (with_entry(shape=[0]), "'a' has data_offsets [0, 4]", "at least 1", ANEW),
        (with_entry(b"", shape=[0], data_offsets=[0, 0]), "[0, 0]", "at least 1", ANEW),
        (with_entry(shape=[1] * 9), "'a' has 9 dimensions", "at most 8", ANEW),
        (with_entry(shape=[1 << 62] * 4), "'a' has data_offsets [0, 4]", "bytes of shape", ANEW),
        (with_entry(data_offsets=[0]), "'a' has data_offsets [0]", "the 4 bytes", ANEW),
        (with_entry(data_offsets=[4, 8]), "'a' starts at byte 4", "0", ANEW),
        (with_entry(b"0" * 8), "end at byte 4", "8, the file's end", ANEW),
        (with_entry(b"0" * 3), "end at byte 4", "3, the file's end", ANEW),
        (safetensors_bytes({"a": ENTRY, "b": ENTRY}, b"0" * 4), "'b' starts at byte 0", "4", ANEW),
        (b"GGUF" + b"\0" * 60, "is a GGUF file", "safetensors", "export the adapter to PEFT"),
        (b"\x93NUMPY" + b"\0" * 60, "is a NumPy", "safetensors", "export the adapter to PEFT"),
        (pickle.dumps({"a": 1}), "is a pickle", *SAVE),
        (b"PK\x03\x04" + b"\0" * 60, "is a pickle", *SAVE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_malformed_file_is_refused(tmp_path, content, found, expected, remedy):
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    error = refusal(read_lora_file, str(file))
    assert_refused(error, str(file), found, expected, remedy)
    assert str(refusal(read_adapter_info, str(file), llama_spec())) == str(error)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
def test_a_pickle_is_refused_by_its_name(tmp_path, suffix):
    file = tmp_path / f"adapter_model{suffix}"
    torch.save(factors("q"), file)
    for path in (str(file), str(tmp_path)):
        assert_refused(refusal(read_lora_file, path), path, f"{suffix}", *SAVE)


def test_a_zip_is_refused_as_a_pickle(tmp_path):
    file = tmp_path / "x.safetensors"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data.pkl", b"\x80\x02.")
    assert_refused(refusal(read_lora_file, str(file)), str(file), "is a pickle", *SAVE)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_C109_a_link_out_of_the_folder_is_refused(tmp_path, name):
    folder = write(tmp_path / "in", factors("q"))
    os.rename(tmp_path / "in" / name, tmp_path / name)
    os.symlink(tmp_path / name, tmp_path / "in" / name)
    found = f"is a link to {str(tmp_path / name)!r}, outside its folder"
    error = refusal(read_lora_file, folder)
    assert_refused(error, str(tmp_path / "in" / name), found, "one inside", "put the file itself")


@pytest.mark.parametrize("path", ["../x", "/etc", "/dev/zero", "a\0b", "x" * 300])
def test_a_path_to_no_adapter_is_refused(path):
    error = refusal(read_lora_file, path)
    assert error.path.startswith(path)
    assert_refused(error, error.path, "no such file", "a PEFT directory", "correct the path")


def test_a_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path, factors("q"))
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    error = refusal(read_lora_file, path)
    assert_refused(error, path, "cut while it was read", "a file that can", "its folder and disk")
