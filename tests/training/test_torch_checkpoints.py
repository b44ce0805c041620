"""torch's distributed checkpoints: weights and AdamW's moments, both ways, and damaged ones."""

import os
import pickle
import shutil
import tomllib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shoal
from shoal.cli.main import main
from shoal.engine.data.batches import open_dataset
from shoal.spec.config import build_config
from shoal.training.check import check, check_weights
from tests.training.test_hugging_face import BATCH, RATE, build, config_of, logits_of
from tests.trainings.runs import train_in


def test_only_a_checkpoint_of_torch_has_moments(tmp_path, capsys):
    build("llama", model := tmp_path / "model")
    with pytest.raises(shoal.UsageError, match=r"optimizer\.from_weights: \S+ has no optimizer's state"):
        check_weights(config_of(model, {}, {"optimizer": {"from_weights": True}}))
    assert main(["export", "hf", str(tmp_path), "--out", str(tmp_path / "out"), "--optimizer"]) == 2
    alone = build_config({"optimizer": {"from_weights": True}})
    with pytest.raises(shoal.UsageError, match="there is no folder to read moments from"):
        check(alone)


def save_sharded(folder: Path) -> None:
    """Save weights as a run with FSDP does, cut over ranks, beside an optimizer's state."""
    import torch.distributed.checkpoint as dcp  # takes a second, as transformers

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weights = load_file(folder / "model.safetensors")
    cut = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in weights.items()}
    (folder / "dcp").mkdir(exist_ok=True)
    dcp.save({"model": cut, "optimizer": {"state": cut, "step": 3}}, checkpoint_id=folder / "dcp")


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_torch_checkpoints_both_ways(name, pool, tmp_path):
    """A checkpoint of two ranks is the model that they saved; an exported one is read by torch alone."""
    import torch.distributed.checkpoint as dcp

    theirs = build(name, tmp_path / "model")
    pool.run(save_sharded, 2, tmp_path / "model")
    stored = tmp_path / "model" / "dcp"
    shutil.copy(tmp_path / "model" / "config.json", stored)
    tokens = torch.randint(300, (2, 40))
    assert torch.equal(logits_of(stored, tokens), logits_of(tmp_path / "model", tokens))
    train_in(pool, config_of(stored, {"tp": 2}), tmp_path / "run")
    words = ["export", "hf", str(tmp_path / "run"), "--out"]
    assert main([*words, str(tmp_path / "out"), "--weights", "dcp"]) == 0 and main([*words, str(tmp_path / "hf")]) == 0
    weights = {key: torch.empty_like(value) for key, value in theirs.named_parameters()}
    dcp.load(weights, checkpoint_id=tmp_path / "out", no_dist=True)
    wanted = type(theirs).from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(value, wanted[key]) for key, value in weights.items())
    assert torch.equal(logits_of(tmp_path / "out", tokens), logits_of(tmp_path / "hf", tokens))


def test_the_optimizer_goes_to_torch_and_back(pool, tmp_path, capsys):
    """Two steps here, two with torch's AdamW, two here: as six with torch's AdamW, which never stopped.

    GPT-2, as the other models of transformers round some values to float32.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    build("gpt2", tmp_path / "model")
    import transformers

    def open_model(folder: Path):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()

    def optimizer(model):
        decay = [{"params": [p for p in model.parameters() if (p.dim() > 1) == matrix], "weight_decay": 0.1 * matrix}
                 for matrix in (True, False)]
        return torch.optim.AdamW(decay, lr=RATE, betas=(0.9, 0.95), eps=1e-5)

    def train(model, rule, steps):
        for step in steps:
            batch = data.batch(range(step * BATCH, (step + 1) * BATCH))
            F.cross_entropy(model(batch.tokens).logits.flatten(0, 1), batch.targets.flatten()).backward()
            rule.step()
            rule.zero_grad()

    def compare(folder: Path) -> None:
        for (key, wanted), got in zip(theirs.named_parameters(), open_model(folder).parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")

    def train_here(folder: Path, layout: dict, out: str, **settings: object):
        changes = {"train": {"steps": 2, "precision": "fp64"}, "optimizer": {"weight_decay": 0.1, **settings}}
        config = config_of(folder, layout, changes)
        check_weights(config)
        train_in(pool, config, tmp_path / f"run-{out}")
        words = ["--weights", "dcp", "--optimizer"] if out == "out" else []
        assert main(["export", "hf", str(tmp_path / f"run-{out}"), "--out", str(tmp_path / out), *words]) == 0

    theirs = open_model(tmp_path / "model")
    data = open_dataset(config_of(tmp_path / "model", {}).data, seed=0, split="train")
    never = optimizer(theirs)
    train(theirs, never, range(2))
    train_here(tmp_path / "model", {"dp": 2, "zero": 3}, "out")

    model = open_model(tmp_path / "model")
    rule = optimizer(model)
    state = {**dict(model.named_parameters()), "optim": get_optimizer_state_dict(model, rule)}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    set_optimizer_state_dict(model, rule, state["optim"])
    assert {each["step"].item() for each in rule.state.values()} == {2.0}
    assert [group["weight_decay"] for group in rule.param_groups] == [0.1, 0.0]
    for group in rule.param_groups:
        group["lr"] = RATE
    train(model, rule, range(2, 4))
    train(theirs, never, range(2, 4))
    for (key, wanted), got in zip(theirs.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")

    state = {"model": dict(model.named_parameters()), "optimizer": get_optimizer_state_dict(model, rule)}
    dcp.save(state, checkpoint_id=tmp_path / "back", no_dist=True)
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "back")
    capsys.readouterr()
    assert main(["import", "hf", str(tmp_path / "back")]) == 0
    section = tomllib.loads(capsys.readouterr().out)["optimizer"]
    assert section == {"from_weights": True, "learning_rate": RATE, "betas": [0.9, 0.95], "eps": 1e-5,
                       "weight_decay": 0.1}
    train_here(tmp_path / "back", {"tp": 2, "pp": 2}, "hf", from_weights=True)
    train(theirs, never, range(2))
    compare(tmp_path / "hf")


def test_a_torch_checkpoint_runs_no_code_and_damage_is_named(tmp_path, capsys):
    import torch.distributed.checkpoint as dcp

    build("llama", model := tmp_path / "model")
    weights = load_file(model / "model.safetensors")

    def refused(message: str) -> None:
        assert main(["import", "hf", str(model)]) == 2
        assert message in capsys.readouterr().err

    dcp.save({"net": {"layer": torch.ones(2)}}, checkpoint_id=model, no_dist=True)
    refused("no tensor is called model.embed_tokens.weight, as in Hugging Face's format; it has net.layer")
    (model / ".metadata").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    refused("it names os.system, which no list of tensors needs")
    for damaged in (b"", b"\x8e" + b"\xff" * 8, pickle.dumps(OrderedDict)):
        (model / ".metadata").write_bytes(damaged)
        refused("it cannot be read")
    (model / ".metadata").write_bytes(b"cpathlib\nPath\n(N(S'is_file'\nS'changed'\ndtb.")  # sets an attribute of Path
    refused("it cannot be read")
    assert callable(Path.is_file)
    (model / ".metadata").unlink()
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")  # opening it would wait for a writer
    refused("model.safetensors: it cannot be read")
    dcp.save(weights, checkpoint_id=model, no_dist=True)
    (model / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(shoal.UsageError, match=r"__0_0\.distcp: tensor 'model\.\S+' cannot be read: \w"):
        logits_of(model, torch.zeros(1, 4, dtype=torch.int64))
    listed = pickle.loads((model / ".metadata").read_bytes())
    listed.state_dict_metadata["model.norm.weight"].chunks.clear()
    dcp.save(weights, checkpoint_id=model, no_dist=True)
    (model / ".metadata").write_bytes(pickle.dumps(listed))
    with pytest.raises(shoal.UsageError, match=r"tensor 'model.norm.weight': \d+ of its elements are in no file"):
        logits_of(model, torch.zeros(1, 4, dtype=torch.int64))
