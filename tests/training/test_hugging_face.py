"""Models from transformers and back: the same logits, the same training on any layout, and clear errors."""

import json
import random
import shlex
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import shoal
from shoal.base.boxes import Box, Piece
from shoal.cli.main import main
from shoal.engine.checkpoint import hugging_face_export
from shoal.engine.checkpoint.gguf import ARCHITECTURES
from shoal.engine.checkpoint.hugging_face import HFWeights, read_hf_config
from shoal.engine.checkpoint.manifest import list_checkpoints, read_manifest
from shoal.engine.data.batches import open_dataset
from shoal.engine.models.transformer import Transformer
from shoal.planning.cost.buckets import count_elements
from shoal.planning.cost.parameters import StagePart
from shoal.spec.catalog import ModelShape
from shoal.spec.config import build_config
from shoal.spec.config.model import ModelConfig
from shoal.spec.hugging_face import FAMILIES, hf_config, model_fields
from shoal.spec.layout import Layout
from shoal.testing.verify.draw import draw_run
from shoal.training.check import check_weights
from tests.trainings.runs import ROOT, small_config, train_in
from tests.trainings.runs import shoal as run_shoal

PAGE = ROOT / "docs" / "hugging-face.md"
WIDE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64,
}  # fmt: skip
SCALING = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
DEEP = WIDE | {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "mscale": 0.9, "mscale_all_dim": 0.7, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 16,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", WIDE | {"tie_word_embeddings": False}),
    "llama-3.1": ("Llama", WIDE | {"rope_parameters": SCALING, "tie_word_embeddings": True, "head_dim": 16}),
    "mistral": ("Mistral", WIDE | {"sliding_window": 9}),
    "qwen2": ("Qwen2", WIDE),
    "qwen2-windows": ("Qwen2", WIDE | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", WIDE | {"head_dim": 16}),
    "mixtral": ("Mixtral", WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen3-moe": ("Qwen3Moe", WIDE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                                      "norm_topk_prob": False}),
    "deepseek-v2": ("DeepseekV2", DEEP | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0,
                                          "q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3", DEEP | {"rope_parameters": YARN}),
    "olmo2": ("Olmo2", WIDE | {"pad_token_id": None}),
    "gemma2": ("Gemma2", WIDE | {
        "head_dim": 8, "query_pre_attn_scalar": 16, "sliding_window": 9, "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 1.5, "pad_token_id": None, "num_hidden_layers": 3,
    }),
    "gemma3": ("Gemma3Text", WIDE | {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9, "pad_token_id": None, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}},
    }),
    "gpt-oss": ("GptOss", WIDE | {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "num_hidden_layers": 3,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150.0, "factor": 32.0, "beta_fast": 4.0,
                            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 16},
    }),
    "llama4": ("Llama4Text", WIDE | {
        "head_dim": 8, "intermediate_size": 16, "intermediate_size_mlp": 48, "num_local_experts": 4,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 9, "no_rope_layers": [1, 0, 1], "floor_scale": 7,
        "num_hidden_layers": 3, "pad_token_id": None,
        "rope_parameters": SCALING | {"high_freq_factor": 1.0, "factor": 16.0},  # as Scout's
    }),
    "llama-yarn": ("Llama", WIDE | {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 300}),
}  # fmt: skip
LAYOUTS = {
    "llama-3.1": {"dp": 2, "zero": 3, "tp": 2, "sequence_parallel": True},
    "mistral": {"cp": 2, "dp": 2, "zero": 2},
    "qwen2-windows": {"cp": 2, "ulysses": 2, "pp": 2},
    # Two ranks hold each head of keys, and its norm's weights.
    "olmo2": {"micro_batch": 4, "tp": 4, "sequence_parallel": True},
    "gemma2": {"micro_batch": 4, "cp": 2, "tp": 2, "zero": 1},
    "gemma3": {"pp": 3, "tp": 2, "sequence_parallel": True},
    "qwen2": {"micro_batch": 4, "tp": 4},  # two ranks hold each head of keys, with its biases
    "qwen3": {"pp": 2, "tp": 2, "schedule": "1f1b"},
    "qwen3-moe": {"dp": 2, "ep": 2, "zero": 1},
    "deepseek-v2": {"pp": 2, "cp": 2},
    "deepseek-v3": {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 2, "zero": 3},
    "gpt-oss": {"dp": 2, "tp": 2, "sequence_parallel": True, "ep": 2, "zero": 3},
    "llama4": {"micro_batch": 4, "cp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
    "gpt2": {"cp": 2, "dp": 2},
}
STEPS, BATCH, RATE = 2, 8, 1e-3


def build(name: str, folder: Path):
    import transformers  # takes a second, also of workers that run other tests

    kind, values = MODELS[name]
    family = kind.removesuffix("Text")
    config = getattr(transformers, f"{kind}Config")(**values)
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}LMHeadModel" if name == "gpt2" else f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        # Norms and biases show where they are left out.
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if not name.endswith(("inv_freq", "embed_scale")):  # constants of the config
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return model


def logits_of(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    """What shoal's model computes with the weights of a folder."""
    shape = ModelConfig(name="x", **read_hf_config(folder)).shape(vocab=1, sequence_length=1)
    with torch.no_grad():
        return fill_from(folder, shape)(tokens)


@torch.no_grad()
def fill_from(folder: Path, shape: ModelShape) -> Transformer:
    model, weights = Transformer(shape), HFWeights(folder, shape)
    for name, p in (*model.named_parameters(), *model.named_buffers()):
        weights.fill(name, Piece(tuple(p.shape), Box.full(tuple(p.shape)), p))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name, tmp_path):
    theirs = build(name, tmp_path / "model")
    tokens = torch.randint(300, (2, 40))
    with torch.no_grad():
        wanted = theirs(tokens).logits
    torch.testing.assert_close(logits_of(tmp_path / "model", tokens), wanted, rtol=0, atol=1e-5 * wanted.abs().max())


def test_the_text_model_of_llama_4_with_images(tmp_path):
    """A folder with one more prefix, whose other tensors are not read."""
    build("llama4", folder := tmp_path / "model")
    tokens = torch.randint(300, (1, 40))
    alone = logits_of(folder, tokens)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": config}))
    stored = {f"language_model.{name}": each for name, each in load_file(folder / "model.safetensors").items()}
    save_file(stored | {"vision_model.x": torch.ones(1)}, folder / "model.safetensors")
    assert torch.equal(logits_of(folder, tokens), alone)


def test_multi_token_prediction_of_deepseek_v3(pool, tmp_path, monkeypatch):
    """Modules beside transformers' own, which read what is exported; elsewhere they are left out."""
    from transformers import DeepseekV3ForCausalLM
    from transformers.modeling_layers import MtpModel

    depth, kind = 2, MODELS["deepseek-v3"][0]
    monkeypatch.setitem(MODELS, "mtp", (kind, MODELS["deepseek-v3"][1] | {"num_nextn_predict_layers": depth}))
    theirs = build("mtp", folder := tmp_path / "model")
    assert "mtp_depth" not in read_hf_config(folder)  # no file has its modules
    torch.manual_seed(2)
    modules = MtpModel(theirs, depth).eval()
    weights = load_file(folder / "model.safetensors")
    for k, layer in enumerate(modules.layers):
        for name, value in layer.state_dict().items():
            name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
            value = float("norm" in name) + 0.1 * torch.randn_like(value)  # of which some are undefined
            if ".experts." in name:
                name, parts = name.rpartition(".")[0], value.chunk(2, 1) if "gate_up" in name else (value,)
                names = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
                weights |= {f"model.layers.{2 + k}.{name}.{e}.{part}.weight": each[e].clone()
                            for part, each in zip(names, parts, strict=True) for e in range(len(value))}  # fmt: skip
            else:
                weights[f"model.layers.{2 + k}.{name}"] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_of(folder, {"pp": 2, "cp": 2})
    check_weights(config)
    assert config.model.mtp_depth == depth
    train_in(pool, config, tmp_path / "run")
    assert main(["export", "hf", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    stored = load_file(tmp_path / "out" / "model.safetensors")
    copies = {f"model.layers.{i}.{each}.weight" for i in (2, 3) for each in ("embed_tokens", "shared_head.head")}
    assert stored.keys() == weights.keys() | copies
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*",
                                                                                      r"model\.layers\.3.*"])
    for where in (folder, tmp_path / "out"):
        theirs = DeepseekV3ForCausalLM.from_pretrained(where)
        modules = MtpModel.from_pretrained(theirs)
        tokens = torch.randint(300, (1, 20))
        with torch.no_grad():
            hidden, wanted = theirs.model(tokens).last_hidden_state, []
            for k in range(depth):
                later = F.pad(tokens[:, k + 1 :], (0, k + 1))
                hidden = modules.forward_layer(k, hidden, torch.arange(20)[None], None, input_ids=later)
                wanted.append(theirs.lm_head(hidden))
        shape = ModelConfig(name="x", **read_hf_config(where)).shape(vocab=1, sequence_length=1)
        ours, found = fill_from(where, shape), []
        ours.head.register_forward_hook(lambda module, args, output, found=found: found.append(output.detach().clone()))
        ours(tokens, F.pad(tokens[:, 1:], (0, 1)))
        for got, logits in zip(found, wanted, strict=False):
            torch.testing.assert_close(got, logits, rtol=0, atol=1e-5 * logits.abs().max())


def test_experts_in_mxfp4(tmp_path, monkeypatch):
    """Random blocks are what transformers decodes, whichever part of a tensor is read."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    monkeypatch.setitem(MODELS, "gpt-oss", (MODELS["gpt-oss"][0], MODELS["gpt-oss"][1] | {
        "hidden_size": 64, "intermediate_size": 96}))
    build("gpt-oss", folder := tmp_path / "model")
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inside, out = stored[name].shape
        blocks = torch.randint(256, (experts, out, inside // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 126, blocks.shape[:-1], dtype=torch.uint8)
        stored[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(stored, folder / "model.safetensors")
    tokens = torch.randint(300, (1, 40))
    wanted = logits_of(folder, tokens)
    save_file({name: each for name, each in stored.items() if f"{name}_blocks" not in stored},
              folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    assert torch.equal(logits_of(folder, tokens), wanted)
    check_weights(config_of(folder, {}))
    weights = HFWeights(folder, ModelConfig(name="x", **read_hf_config(folder)).shape(vocab=1, sequence_length=1))
    box, full = Box((1, 5, 33), (2, 40, 20)), stored["model.layers.1.mlp.experts.gate_up_proj"]
    weights.fill("layers.1.mlp.experts.up", Piece((4, 96, 64), box, part := torch.empty(box.shape)))
    assert torch.equal(part, full[1:3, 33:53, 11:91:2].mT)


def config_of(folder: Path, parallel: dict, changes: dict[str, dict] = {}):  # noqa: B006
    fields = read_hf_config(folder)
    if "experts" in fields:  # transformers adds no such loss unless asked, and moves no bias
        fields["experts"]["balance_loss"] = 0.0
        fields["experts"]["bias_update"] = min(1e-12, fields["experts"].get("bias_update", 0.0))
    values = {
        "model": {"name": "imported", "weights": str(folder), **fields}, "parallel": {"micro_batch": 2, **parallel},
        "data": {"source": "synthetic", "sequence_length": 32},
        "train": {"steps": STEPS, "global_batch": BATCH, "validation_sequences": 1, "threads": 1, "device": "cpu"},
        "optimizer": {"learning_rate": RATE, "eps": 1e-5,  # GPT-2's biases of keys have no gradient but rounding's
                      "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0,
                      "clip_norm": 0.0},
        "metrics": {"tensorboard": False},
    }  # fmt: skip
    return build_config({name: section | changes.get(name, {}) for name, section in values.items()})


@pytest.mark.parametrize("name", LAYOUTS)
def test_imported_trained_on_a_layout_and_exported(name, pool, tmp_path):
    """As transformers' model with torch's AdamW on one device; and what is exported is what was trained."""
    theirs = build(name, tmp_path / "model")
    config = config_of(tmp_path / "model", LAYOUTS[name])
    check_weights(config)
    train_in(pool, config, tmp_path / "run")
    data = open_dataset(config.data, seed=config.train.seed, split="train")
    rule = torch.optim.AdamW(theirs.parameters(), lr=RATE, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    for step in range(STEPS):
        batch = data.batch(range(step * BATCH, (step + 1) * BATCH))
        F.cross_entropy(theirs(batch.tokens).logits.flatten(0, 1), batch.targets.flatten()).backward()
        rule.step()
        rule.zero_grad()
    assert main(["export", "hf", str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    exported = type(theirs).from_pretrained(tmp_path / "out")
    for (key, wanted), got in zip(theirs.named_parameters(), exported.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-2 * STEPS * RATE, msg=lambda m, key=key: f"{key}: {m}")
    tokens = torch.randint(300, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(tmp_path / "out", tokens), exported(tokens).logits, rtol=0, atol=1e-5)
    words = ["export", "hf", str(tmp_path / "run"), "--weights", "dcp", "--optimizer"]
    assert main([*words, "--out", str(tmp_path / "dcp")]) == 0
    [saved] = list_checkpoints(tmp_path / "run" / "checkpoints")
    stored = HFWeights(tmp_path / "dcp", config.model.shape(vocab=1, sequence_length=1))
    for moment in ("exp_avg", "exp_avg_sq"):
        for key, wanted in shoal.load_checkpoint(saved.path, prefix=(before := f"optimizer.{moment}.")).items():
            size = tuple(wanted.shape)
            stored.fill(key.removeprefix(before), Piece(size, Box.full(size), got := torch.empty(size)), moment)
            assert torch.equal(got, wanted), key


def test_an_export_is_as_long_as_it_was_trained(corpus, pool, tmp_path):
    """And the run's own model is that of the catalog, so that runs of before resume."""
    model = {"name": "tiny", "layers": 1, "hidden": 32, "heads": 2, "ffn": 64, "max_sequence": 16}
    config = small_config(corpus, model=model, train={"steps": 1, "validate_every": 0})
    folder = train_in(pool, config, tmp_path / "run")
    shoal.export_hf(folder, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 32
    [saved] = list_checkpoints(folder / "checkpoints")
    assert read_manifest(saved.path).extra["model"]["max_sequence"] == 16


def test_a_chat_template_beside_the_tokenizer_is_exported(corpus, pool, tmp_path):
    from transformers import AutoTokenizer

    shoal.train_tokenizer(small_config(corpus).data, vocab_size=280, out=tmp_path / "own" / "tokenizer.json")
    (tmp_path / "own" / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    config = small_config(
        corpus, train={"steps": 1, "validate_every": 0}, data={"tokenizer": str(tmp_path / "own" / "tokenizer.json")})
    folder = train_in(pool, config, tmp_path / "run")
    shoal.export_hf(folder, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False) == "<Hello>"
    assert tokenizer.eos_token == "<|endoftext|>"


def test_experts_in_every_layer_of_a_model_of_the_catalog_are_exported(corpus, pool, tmp_path):
    """Their width is not that of its dense layers, of which none is left."""
    model = {"name": "tiny", "layers": 1, "hidden": 32, "heads": 2, "experts": {"count": 4, "per_token": 2, "ffn": 48}}
    config = small_config(corpus, model=model, train={"steps": 1, "validate_every": 0})
    folder, tokens = train_in(pool, config, tmp_path / "run"), torch.randint(257, (1, 16))
    shoal.export_hf(folder, tmp_path / "out")
    from transformers import MixtralForCausalLM

    with torch.no_grad():
        theirs = MixtralForCausalLM.from_pretrained(tmp_path / "out")(tokens).logits
        torch.testing.assert_close(logits_of(tmp_path / "out", tokens), theirs, rtol=0, atol=1e-5)
    (text := tmp_path / "text.txt").write_text((corpus / "shoal.jsonl").read_text()[:5000])
    exported = shoal.evaluate(tmp_path / "out", text, sequence_length=32)
    assert exported.loss == pytest.approx(shoal.evaluate(folder, text).loss, rel=1e-5)


def test_the_table_of_families_is_true():
    """Each row of the page says which tests a family has, and these exist; the drawn runs have all of its parts."""
    import transformers

    page = PAGE.read_text().partition("| `model_type` | import |")[2].split("\n\n")[0].splitlines()[2:]
    rows = {kind: [cell == "yes" for cell in cells] for kind, *cells in (
        [cell.strip() for cell in line.strip("|").split("|")] for line in page)}  # fmt: skip
    assert rows.keys() == FAMILIES.keys()
    drawn = [draw_run(random.Random(i).choice).model for i in range(300)]
    kinds: dict[str, set[str]] = {}
    for name, (kind, values) in MODELS.items():
        config = getattr(transformers, f"{kind}Config")(**values)
        kinds.setdefault(config.model_type, set()).add(name)
        fields = model_fields(config.to_dict(), name) | {"mtp_depth": 0}  # not in these classes
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(config)
        shape = ModelConfig(name="x", **fields).shape(vocab=1, sequence_length=1)
        count = count_elements(shape, Layout(), StagePart(range(shape.layers)))
        assert sum(count) == shape.parameters() == sum(weight.numel() for weight in theirs.parameters())
        assert FAMILIES[config.model_type].architecture == hf_config(shape, "float32", name)["architectures"][0]
        for part, value in FAMILIES[config.model_type].parts.items():
            assert part == "family" or any(getattr(model, part) == value for model in drawn), part
    for kind, (*always, on_layout, is_drawn, estimated, gguf) in rows.items():
        assert all((*always, is_drawn, estimated)) and kind in kinds
        assert on_layout == bool(kinds[kind] & LAYOUTS.keys()) and gguf == (kind in ARCHITECTURES), kind


def test_the_page_from_the_hub_to_a_model_folder(tmp_path, capsys, monkeypatch):
    """The page's commands on a small model and one rank; then export in two files, and import of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    stored, commit = tmp_path / "models--Qwen--Qwen3-0.6B", "a" * 40
    folder = stored / "snapshots" / commit
    build("qwen3", folder)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(commit)
    Path("corpus").mkdir()
    for number in range(40):
        Path("corpus", f"{number}.txt").write_text(f"Row {number} of a text. " * 20)
    Path("held-out.txt").write_text("Row 41 of a text. " * 20)
    assert main(["data", "train-tokenizer", "--data.paths", "corpus", "--vocab-size", "290", "--out",
                 str(folder / "tokenizer.json")]) == 0
    small = ["--train.steps", "2", "--train.global-batch", "8", "--data.sequence-length", "32", "--train.threads", "1",
             "--train.validation-sequences", "8", "--data.cache", "cache", "--data.validation-fraction", "0.3",
             "--metrics.sample-prompt", ""]  # fmt: skip
    block = PAGE.read_text().partition("    shoal import hf")[1:]
    for line in "".join(block).split("\n\n")[0].splitlines():
        program, *words = shlex.split(line, comments=True)
        if words[0] == "train":
            words = words[: words.index("--parallel.dp")] + words[words.index("--run-folder") :]
            code, said = run_shoal(*words, *small, cwd=tmp_path)
            assert code == 0, said
        elif program == "shoal" and not {"--tasks", "gguf"} & {*words}:  # whose libraries are not everywhere
            assert main(words) == 0, line
    assert f'name = "Qwen3-0.6B"\nweights = "{folder}"' in Path("run.toml").read_text()
    assert main(["eval", "Qwen/Qwen3-0.6B", "--data", "held-out.txt", "--limit", "1"]) == 0  # without a folder
    capsys.readouterr()
    monkeypatch.setattr(hugging_face_export, "SHARD_BYTES", 60_000)
    assert main(["export", "hf", "trained", "--out", "out", "--dtype", "bfloat16"]) == 0
    assert "Qwen3ForCausalLM, step 2, bfloat16; with its tokenizer" in capsys.readouterr().out
    assert len(list(Path("out").glob("model-*.safetensors"))) == 2
    from transformers import AutoModelForCausalLM, AutoTokenizer

    exported = AutoModelForCausalLM.from_pretrained("out", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained("out")
    assert exported.config.eos_token_id == tokenizer.eos_token_id
    assert exported.dtype == torch.bfloat16 and tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.decode(tokenizer.encode("a text")) == "a text"
    assert main(["import", "hf", "out"]) == 0
    assert 'tokenizer = "' in capsys.readouterr().out
    Path("out", "tokenizer.json").rename("tokenizer.json")
    assert main(["import", "hf", "out", "--out", "new.toml"]) == 0
    assert "--data.tokenizer FILE (its tokenizer.json, which the folder lacks)" in capsys.readouterr().out
    assert main(["export", "hf", "trained", "--out", "out"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert not list(Path().glob(".out*"))
    assert main(["import", "hf", "owner/none"]) == 2 and main(["import", "hf", str(tmp_path / "none")]) == 2
    assert "owner/none is no folder, and cannot be taken from the hub: " in capsys.readouterr().err
