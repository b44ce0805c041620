"""Runs as files of llama.cpp: tensors under the names of its own library, values, tokenizer, and what is refused."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import shoal
from shoal.cli.main import main
from shoal.engine.checkpoint.gguf import _write_values, check_gguf
from shoal.engine.data.tokenizer import BytesTokenizer, load_tokenizer
from shoal.spec.catalog import model_shape
from shoal.spec.config.model import ExpertsConfig, ModelConfig
from tests.training.test_hugging_face import SCALING, build


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokenizer.json"
    words = ["--data.source", "text", "--data.paths", __file__, "--vocab-size", "290", "--out", str(path)]
    assert main(["data", "train-tokenizer", *words]) == 0
    return path


def train(name: str, tokenizer: Path) -> None:
    build(name, Path("model"))
    assert main(["import", "hf", "model", "--out", "run.toml"]) == 0
    words = ["--data.source", "synthetic", "--data.sequence-length", "16", "--train.steps", "1", "--train.global-batch",
             "1", "--data.tokenizer", str(tokenizer), "--metrics.sample-prompt", ""]
    assert main(["train", "run.toml", *words, "--run-folder", "run"]) == 0


@pytest.mark.parametrize(("name", "architecture"), [("llama-3.1", "llama"), ("qwen2", "qwen2"), ("mixtral", "llama")])
def test_tensors_and_values_are_those_of_the_library(name, architecture, tokenizer, tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    train(name, tokenizer)
    assert main(["export", "gguf", "run", "--out", "model.gguf"]) == 0 == main(["export", "hf", "run", "--out", "hf"])
    read = gguf.GGUFReader("model.gguf")
    found = {each.name: torch.tensor(each.data) for each in read.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 2)
    experts: dict[str, list[torch.Tensor]] = {}
    for key, wanted in load_file("hf/model.safetensors").items():
        if ".experts." in key:
            experts.setdefault(re.sub(r"experts\.\d\.(w\d)\.weight", r"experts.\1", key), []).append(wanted)
            continue
        got = found.pop(names.get_name(key, (".weight", ".bias")))
        if architecture == "llama" and key.endswith(("q_proj.weight", "k_proj.weight")):
            width = 16 if name == "llama-3.1" else 8  # neighbours (2 i, 2 i + 1) of a head are (i, i + width / 2) here
            got = got.view(-1, width // 2, 2, 32).transpose(1, 2).reshape(got.shape)
        assert torch.equal(got, wanted), key
    for key, each in experts.items():
        assert torch.equal(found.pop(names.get_name(key) + ".weight"), torch.stack(each)), key
    if name == "llama-3.1":
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        config = LlamaConfig(rope_parameters=SCALING, head_dim=16)
        plain = 1e4 ** (-torch.arange(0, 16, 2) / 16)
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        torch.testing.assert_close(plain / found.pop("rope_freqs.weight"), frequencies)
    assert not found
    values = {key: field.contents() for key, field in read.fields.items()}
    assert values["general.architecture"] == architecture and values["tokenizer.ggml.pre"] == "gpt-2"
    own = load_tokenizer(str(tokenizer))
    assert values["tokenizer.ggml.eos_token_id"] == own.end_of_document
    assert values["tokenizer.ggml.tokens"][own.end_of_document] == "<|endoftext|>"
    assert len(values["tokenizer.ggml.tokens"]) == 300 and len(values["tokenizer.ggml.merges"]) == 290 - 257
    assert values[f"{architecture}.attention.head_count_kv"] == 2
    assert main(["export", "gguf", "run", "--out", "model.gguf"]) == 2  # it exists
    assert main(["export", "gguf", "run", "--out", "half.gguf", "--dtype", "bfloat16"]) == 0
    assert Path("half.gguf").stat().st_size < 0.8 * Path("model.gguf").stat().st_size


def test_what_llama_cpp_would_compute_otherwise_is_refused(tokenizer, tmp_path):
    def refused(message: str, name: str = "tiny", words: Path = tokenizer, **changes: object) -> None:
        with pytest.raises(shoal.UsageError, match=message):
            check_gguf(model_shape(name).model_copy(update=changes), load_tokenizer(str(words)), "run")

    assert check_gguf(model_shape("tiny"), BytesTokenizer(), "run") == "llama"
    refused("the family gpt2; llama, mistral", "gpt2-124m")
    refused("a model with windows", window=4)
    other, values = tmp_path / "other.json", json.loads(tokenizer.read_text())
    other.write_text(tokenizer.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    refused("no name for the way in which this tokenizer splits", words=other)
    other.write_text(json.dumps(values | {"normalizer": {"type": "Lowercase"}}))
    refused("no name for the way in which this tokenizer splits", words=other)
    end = {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
           "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}],
           "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}}
    other.write_text(json.dumps(values | {"post_processor": end}))
    refused("adds tokens after a text", words=other)


def test_the_width_of_experts_stands_where_llama_cpp_reads_it_in_a_model_without_dense_layers():
    experts = ExpertsConfig(count=4, per_token=2, ffn=48)
    shape = ModelConfig(name="tiny", experts=experts).shape(vocab=257, sequence_length=16)
    writer = Mock()
    _write_values(writer, shape, "model")
    writer.add_feed_forward_length.assert_called_once_with(48)
    writer.add_expert_feed_forward_length.assert_called_once_with(48)
