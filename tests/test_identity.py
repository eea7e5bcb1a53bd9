from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading

import pytest
import torch

from checkpoints import factors, llama_spec, write
from loramux.checkpoint import LoraAdapter, LoraModule, read_lora_file
from loramux.identity import (
    AdapterPrefixRoots,
    adapter_digest,
    adapter_prefix_root,
    read_adapter_digest,
)

Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def module(**changes) -> LoraModule:
    plain = LoraModule(torch.arange(8.0).view(2, 4), torch.arange(6.0).view(3, 2), alpha=4.0)
    return dataclasses.replace(plain, **changes)


def digest_of(**modules: LoraModule) -> bytes:
    return adapter_digest(LoraAdapter(modules))


def test_the_digest_is_of_the_content_only():
    plain = digest_of(q=module(), k=module(alpha=8.0))
    transposed = module(b=module().b.T.contiguous().T)
    assert len(plain) == 32
    assert digest_of(k=module(alpha=8.0), q=transposed) == plain
    noted = LoraAdapter({"q": module(), "k": module(alpha=8.0)}, path="elsewhere", notes=("x",))
    assert adapter_digest(noted) == plain


@pytest.mark.parametrize(
    "other",
    [
        {"r": module()},
        {"q": module(alpha=4.0 + 2**-50)},
        {"q": module(rslora=True)},
        {"q": module(embedding=True)},
        {"q": module(a=module().b.T, b=module().a.T)},
        {"q": module(a=module().a + 0.5)},
        {"q": module(b=module().b.view(torch.int32).view(3, 2))},
        {"q": module(a=module().a.view(1, 8))},
        {"q": module(a=module().a.view(torch.bfloat16).view(2, 8))},
        {"q": module(), "k": module()},
        {},
    ],
)
def test_anything_the_delta_depends_on_changes_the_digest(other):
    assert digest_of(**other) != digest_of(q=module())


def test_the_digest_is_the_same_in_another_process(tmp_path):
    path = write(tmp_path, {**factors(Q), **factors(K)})
    script = (
        "from loramux import adapter_digest, read_lora_file\n"
        f"print(adapter_digest(read_lora_file({path!r})).hex())"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == read_adapter_digest(llama_spec(), path).hex()


def test_the_digest_reads_as_the_pool_reads(tmp_path):
    path = write(tmp_path, factors(Q))

    def convert(tensors):
        return {name.replace("q_proj", "k_proj"): tensor for name, tensor in tensors.items()}

    converted = read_adapter_digest(llama_spec(convert_keys=convert), path)
    assert converted == adapter_digest(read_lora_file(write(tmp_path / "k", factors(K))))
    assert converted != read_adapter_digest(llama_spec(), path)


def test_a_root_is_of_the_digest_and_none_is_the_base():
    roots = [adapter_prefix_root(bytes([i]) * 32) for i in range(2)]
    assert roots[0] != roots[1]
    assert roots[0] != bytes(32)
    assert adapter_prefix_root(None) == b""
    for bad in (b"", b"short", "x" * 32):
        with pytest.raises(ValueError, match="32 bytes"):
            adapter_prefix_root(bad)


class TestAdapterPrefixRoots:
    def test_names_of_equal_weights_share_a_root_and_unknown_names_have_none(self):
        roots = AdapterPrefixRoots({"old": b"root"})
        roots.register("a", b"1" * 32)
        roots.register("b", b"1" * 32)
        assert roots.root("a") == roots.root("b") == adapter_prefix_root(b"1" * 32)
        assert (roots.root("old"), roots.root("nobody")) == (b"root", None)
        roots.register("a", b"2" * 32)
        assert roots.root("a") == adapter_prefix_root(b"2" * 32)
        roots.unregister("a")
        roots.unregister("a")
        assert roots.root("a") is None

    def test_registering_no_digest_is_refused(self):
        roots = AdapterPrefixRoots()
        with pytest.raises(ValueError, match="32 bytes"):
            roots.register("a", None)
        assert roots.root("a") is None

    def test_read_takes_given_digests_and_reads_the_other_files(self, tmp_path):
        path = write(tmp_path, factors(Q))
        spec = llama_spec(adapters={"given": "/nowhere", "read": path})
        roots = AdapterPrefixRoots.read(spec, {"given": b"3" * 32, "unserved": b"4" * 32})
        assert roots.root("given") == adapter_prefix_root(b"3" * 32)
        assert roots.root("read") == adapter_prefix_root(read_adapter_digest(spec, path))
        assert roots.root("unserved") is None

    def test_threads_may_share_it(self):
        roots = AdapterPrefixRoots()
        digests = [bytes([i]) * 32 for i in range(8)]
        known = {None, *map(adapter_prefix_root, digests)}
        seen: set[bytes | None] = set()

        def work(digest: bytes) -> None:
            for _ in range(200):
                roots.register("a", digest)
                seen.add(roots.root("a"))
                roots.unregister("a")

        threads = [threading.Thread(target=work, args=(digest,)) for digest in digests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen <= known
        assert roots.root("a") is None
