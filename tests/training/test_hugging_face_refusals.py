"""Models of transformers that shoal does not read, or not as a run asks, are refused with one clear error."""

import json
import tomllib

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

import shoal
from shoal.cli.main import main
from shoal.engine.checkpoint import dcp, hugging_face_export
from shoal.spec.catalog import model_shape
from shoal.spec.config.model import ModelConfig
from shoal.spec.hugging_face import hf_config, model_fields
from shoal.training.check import check_weights
from shoal.training.run_folder import new_run
from tests.training.test_hugging_face import WIDE, build, config_of


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gemma3"}, "model_type = 'gemma3' is not a family"),
        ({"model_type": ["llama"]}, "is not a family"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', but shoal computes"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type = 'dynamic'"),
        ({"num_hidden_layers": None, "hidden_size": None}, "config.json"),
        ({"num_hidden_layers": 3}, "no file has the tensor 'model.layers.2."),
        ({"intermediate_size": 64}, "has the shape (48, 32), this model (64, 32)"),
        ({"max_position_embeddings": "long"}, "config.json: config: model.max_sequence = 'long'"),
        ({"num_attention_heads": 0, "head_dim": None}, "config.json: one of its values is wrong"),
        ({"rope_parameters": {"rope_theta": 10**400}}, "config.json: one of its values is wrong"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": None}, "no value for per_token"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not read"),
    ],
)
def test_another_model_is_refused(changes, says, tmp_path, capsys):
    build("llama", model := tmp_path / "model")
    values = json.loads((model / "config.json").read_text())
    config = config_of(model, {"micro_batch": 2})
    (model / "config.json").write_text(json.dumps(values | changes))
    try:
        config = config_of(model, {"micro_batch": 2})
    except shoal.UsageError as error:
        assert says in str(error)
        assert main(["import", "hf", str(model)]) == 2
        return
    with pytest.raises(shoal.UsageError) as refused:
        check_weights(config)
    assert says in str(refused.value)


def test_a_mistral_model_has_transformers_default_window():
    import transformers

    fields = model_fields({"model_type": "mistral", **WIDE, "rms_norm_eps": 1e-6}, "here")
    assert fields["window"] == transformers.MistralConfig().sliding_window == 4096


def test_sequences_longer_than_the_model_are_asked_for(tmp_path):
    """By default the run's are as long as the model's; rotary positions have no end, learned ones do."""
    for name in ("llama", "gpt2"):
        build(name, model := tmp_path / name)
        for asked, length in ((None, 64), (32, 32), *(((128, 128),) if name == "llama" else ())):
            values = tomllib.loads(shoal.import_hf(model, sequence_length=asked))
            assert values["data"]["sequence_length"] == length
        config = config_of(model, {"micro_batch": 2}, {"data": {"sequence_length": 128}})
        if name == "llama":
            check_weights(config)
            continue
        with pytest.raises(shoal.UsageError, match=r"sequence_length = 128: .* for 64 tokens\.\n  Set at most 64"):
            check_weights(config)
        with pytest.raises(shoal.UsageError, match=r"--sequence-length 128: .* for 64 tokens\.\n  Give at most 64"):
            shoal.import_hf(model, sequence_length=128)


@pytest.mark.parametrize(("parts", "message"), [
    ({"depths": {"capacity": 0.5}}, r"the nearest, llama, has others of depths = \{.*\} \(None\)\."),
    ({"experts": {"count": 4, "per_token": 2, "shared": 1}}, r"mixtral, has others of experts\.shared = 1 \(0\)\."),
    ({"experts": {"count": 4, "bias_update": 0.01}}, r"experts\.bias_update = 0\.01 \(0\.0\)\."),
    ({"qkv_bias": True, "sinks": True}, r"qwen2, has others of sinks = True \(False\)\."),
    ({"qkv_bias": True, "head_dim": 48}, r"llama, has others of qkv_bias = True \(False\)\."),
    ({"local_rope_theta": 77.0, "window": 8, "pattern": ("local", "global")},
     r"llama, has others of local_rope_theta = 77\.0 \(None\), windows = \[8, None, "),
])  # fmt: skip
def test_a_model_of_no_family_names_what_the_nearest_has_not(parts, message):
    shape = ModelConfig(name="llama-3.2-1b", **parts).shape(vocab=1, sequence_length=1)
    with pytest.raises(shoal.UsageError, match=message):
        hf_config(shape, "float32", "here")


def test_a_part_with_its_usual_value_makes_no_other_model():
    shape = ModelConfig(name="llama-3.2-1b", query_scalar=64).shape(vocab=128256, sequence_length=1)
    assert hf_config(shape, "float32", "here") == hf_config(model_shape("llama-3.2-1b"), "float32", "here")


@pytest.mark.parametrize(("name", "parts"), [
    ("llama-3-8b", {"temperature_floor": 10}), ("gemma-3-1b", {"pattern": ("global",)}),
    ("deepseek-v2", {"experts": {"groups": 1, "groups_per_token": 3, "count": 160, "per_token": 6, "ffn": 64}}),
])  # fmt: skip
def test_a_part_that_nothing_reads_makes_no_other_model(name, parts):
    family = hf_config(model_shape(name), "float32", "here")["model_type"]
    shape = ModelConfig(name=name, layers=4, **parts).shape(vocab=1000, sequence_length=64)
    assert hf_config(shape, "float32", "here")["model_type"] == family


def test_a_selection_bias_that_the_family_does_not_store_is_refused():
    experts = model_shape("llama-4-scout").experts.model_copy(update={"bias_update": 0.05})
    shape = model_shape("llama-4-scout").model_copy(update={"experts": experts})
    with pytest.raises(shoal.UsageError, match=r"nearest, llama4_text, has others of experts\.bias_update = 0\.05 \(0"):
        hf_config(shape, "float32", "here")


def test_no_folder_is_told_from_a_folder_without_a_model(tmp_path):
    (tmp_path / "file").write_text("")
    for name in ("missing", "file"):
        with pytest.raises(shoal.UsageError, match=r"there is no such folder\.\n  Give one with config\.json"):
            shoal.import_hf(tmp_path / name)


def test_quantised_weights_are_refused(tmp_path):
    build("llama", model := tmp_path / "model")
    config = config_of(model, {})
    stored = load_file(model / "model.safetensors")
    save_file(stored | {"lm_head.weight": stored["lm_head.weight"].to(torch.int8)}, model / "model.safetensors")
    with pytest.raises(shoal.UsageError, match=r"'lm_head.weight' is stored as I8; F64, F32"):
        check_weights(config)


def test_the_model_of_the_folder_is_that_of_the_run(tmp_path):
    build("llama", model := tmp_path / "model")
    config = config_of(model, {})
    changed = config.model_copy(update={"model": config.model.model_copy(update={"rope_theta": 77.0})})
    with pytest.raises(shoal.UsageError, match=r"model\.rope_theta = 77\.0, but the model of model.weights"):
        check_weights(changed)
    with pytest.raises(shoal.UsageError, match=r"is not the folder of a run \(run.toml is missing\)\.(\n|$)"):
        shoal.export_hf(model, tmp_path / "again")
    run = new_run(shoal.RunConfig(), tmp_path / "run")
    with pytest.raises(shoal.UsageError, match=r"is the folder of a run, not(.|\n)*shoal export hf .*run --out MODEL"):
        check_weights(config.replace(model={"weights": run}))
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"vocab_size": "many"}))
    with pytest.raises(shoal.UsageError, match=r"model\.vocab = 'many'"):
        check_weights(config)


@pytest.mark.parametrize("weights", ["safetensors", "dcp"])
def test_an_export_to_a_full_disk_is_one_error_and_leaves_nothing(base_run, tmp_path, monkeypatch, weights):
    def full(*_, **__):
        error = "Error while serializing: I/O error: No space left on device (os error 28)"
        raise SafetensorError(error) if weights == "safetensors" else CheckpointException(error, {})

    monkeypatch.setattr(hugging_face_export, "save_file", full)
    monkeypatch.setattr(dcp, "save", full)
    with pytest.raises(shoal.UsageError, match=r"out cannot be written: (.|\n)*Is its disk full"):
        shoal.export_hf(base_run[0], tmp_path / "out", weights=weights)
    assert not list(tmp_path.iterdir())
