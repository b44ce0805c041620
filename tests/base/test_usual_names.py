"""Options and keys of other trainers, given to shoal: the error names shoal's, and their values where these differ."""

from pathlib import Path

import pytest
import tomli_w

import shoal
from shoal.base.errors import UsageError
from shoal.base.usual_names import OTHER_VALUES, list_usual
from shoal.cli.main import main
from shoal.planning.describe import describe_run
from shoal.report.planning.other_software import megatron_arguments, torchtitan_config
from shoal.spec.layout import Layout

LAYOUT = Layout(dp=16, zero=1, tp=4, sequence_parallel=True, pp=2, schedule="interleaved-1f1b", virtual_stages=4)


def test_arguments_of_megatron_are_translated(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan for Megatron prints its arguments: the way back is one paste."""
    run = describe_run(LAYOUT, model="llama-3-8b", cluster="16x8xH100", global_batch=512, software="megatron-core")
    words = " ".join(megatron_arguments(run)).split()
    assert main(["estimate", "--model", "llama-3-8b", "--cluster", "16x8xH100", *words]) == 2
    said = capsys.readouterr().err
    for line in (
        "--tensor-model-parallel-size: --parallel.tp\n", "--pipeline-model-parallel-size: --parallel.pp\n",
        "--context-parallel-size: --parallel.cp\n", "--expert-model-parallel-size: --parallel.ep\n",
        "--micro-batch-size: --parallel.micro-batch\n", "--global-batch-size: --global-batch\n",
        "--use-distributed-optimizer: --parallel.zero 1\n", "--bf16: --precision bf16\n",
        "--num-layers-per-virtual-pipeline-stage: --parallel.virtual-stages, the stages of a rank: layers / pp",
        "--overlap-grad-reduce: --parallel.overlap\n",
    ):  # fmt: skip
        assert f"For {line}" in said


def test_tables_of_torchtitan_are_translated_with_their_keys(tmp_path: Path) -> None:
    layout = Layout(dp=16, zero=3, zero_shard=8, tp=4, pp=2, micro_batch=2)
    run = describe_run(layout, model="llama-3-8b", cluster="16x8xH100", global_batch=512, software="torchtitan")
    (tmp_path / "titan.toml").write_text(tomli_w.dumps(torchtitan_config(run)))
    with pytest.raises(UsageError) as refused:
        shoal.load_config(tmp_path / "titan.toml")
    said = str(refused.value)
    assert "no key 'training'; did you mean 'train'? Of its keys: local_batch_size is parallel.micro_batch" in said
    assert "data_parallel_shard_degree is parallel.dp, the product of both degrees, with zero = 3" in said
    assert "tensor_parallel_degree is parallel.tp;" in said
    assert "no key 'activation_checkpoint'; did you mean 'parallel.recompute'?" in said


def test_help_finds_a_name_of_another_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "tensor-model-parallel-size"]) == 0
    assert "--parallel.tp" in capsys.readouterr().out


def test_other_values_belong_to_names_that_are_known() -> None:
    assert all(list_usual(name) != [name] for name in OTHER_VALUES)
