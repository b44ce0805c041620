"""The files of a job do what they say, as far as that can be seen without a cluster."""

import os
import re
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

import shoal
from shoal.base.errors import UsageError
from shoal.cli.main import main
from shoal.launch.torch_elastic import OWN_STORE
from shoal.spec.cluster_job import ClusterJob
from shoal.spec.config import RunConfig, build_config
from shoal.training.stop import PREEMPTED
from tests.trainings.runs import ROOT, logged, start

CONFIG = build_config({"parallel": {"dp": 16}, "data": {"source": "text", "paths": ["/données/\u2028 \U0001f41f.txt"]}})
JOBS: dict[str, dict[str, Any]] = {
    "slurm": {"run_folder": "runs/one"},
    "k8s": {"run_folder": "/runs/one", "image": "registry:5000/shoal:latest"},
    "sky": {"run_folder": "/runs/one", "volume": "storage", "gpu": "H100"},
    "ray": {"run_folder": "/runs/one"},
}


def built(on: str, config: RunConfig = CONFIG, **more: Any) -> str:
    return shoal.submit(config, ClusterJob(on=on, **JOBS[on] | more), dry_run=True).text


def documents(text: str) -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def job_of(found: dict[str, Any]) -> dict[str, Any]:
    """The template of the only job of a JobSet."""
    [replicated] = found["JobSet"]["spec"]["replicatedJobs"]
    return replicated["template"]


# Fields of a JobSet by its API reference (jobset.x-k8s.io/v1alpha2). A set has the values that a field may have.
JOBSET: dict[str, Any] = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"}, "kind": {"JobSet"}, "metadata": dict,
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "successPolicy": {"operator": {"All", "Any"}, "targetReplicatedJobs": [str]},
        "failurePolicy": {
            "maxRestarts": int, "restartStrategy": {"Recreate", "BlockingRecreate", "InPlaceRestart"},
            "rules": [{
                "name": re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?"),
                "action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob",
                           "RestartJobAndIgnoreMaxRestarts"},
                "onJobFailureReasons": [{"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes",
                                         "MaxFailedIndexesExceeded", "PodFailurePolicy"}],
                "onJobFailureMessagePatterns": [str], "targetReplicatedJobs": [str],
            }],
        },
        "replicatedJobs": [{
            "name": str, "groupName": str, "replicas": int, "template": {"metadata": dict, "spec": dict},
            "dependsOn": [{"name": str, "status": {"Ready", "Complete"}}],
        }],
        "suspend": bool, "coordinator": {"replicatedJob": str, "jobIndex": int, "podIndex": int},
        "managedBy": str, "ttlSecondsAfterFinished": int, "volumeClaimPolicies": list,
    },
}  # fmt: skip


def check_fields(found: Any, wanted: Any, path: str) -> None:
    if isinstance(wanted, dict):
        assert isinstance(found, dict), path
        for name, value in found.items():
            assert name in wanted, f"{path}.{name} is no field"
            check_fields(value, wanted[name], f"{path}.{name}")
    elif isinstance(wanted, list):
        assert isinstance(found, list), path
        for number, each in enumerate(found):
            check_fields(each, wanted[0], f"{path}[{number}]")
    elif isinstance(wanted, set):
        assert found in wanted, f"{path} = {found!r}"
    elif isinstance(wanted, re.Pattern):
        assert wanted.fullmatch(found), f"{path} = {found!r}"
    else:
        assert type(found) is wanted, f"{path} = {found!r}"


def check_jobset(found: dict[str, Any]) -> None:
    """Check the fields of a JobSet, and that the names of its pods are labels of DNS."""
    check_fields(found, JOBSET, "jobset")
    for each in found["spec"]["replicatedJobs"]:
        last = each["template"]["spec"]["completions"] - 1
        pod = f"{found['metadata']['name']}-{each['name']}-{each['replicas'] - 1}-{last}"
        assert len(pod) <= 63 and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", pod), f"{pod}: at most 63 characters"


# ---- SLURM -----------------------------------------------------------------------------------------------------------

SRUN = """#!/bin/bash
echo "$@" >> "$SAID"
code=$(sed -n "$(wc -l < "$SAID")p" "$CODES")
exit "${code:-99}"
"""
SCONTROL = """#!/bin/bash
echo "scontrol $*" >> "$SAID"
"""


def run(folder: Path, codes: list[int], **job: Any) -> tuple[int, list[str]]:
    """The batch script with an srun that ends with these codes in turn; its exit code, and what it called."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "job": built("slurm", **job)}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "codes").write_text("".join(f"{code}\n" for code in codes))
    environment = {
        "PATH": f"{folder}:{os.environ['PATH']}", "SAID": str(folder / "said"), "CODES": str(folder / "codes"),
        "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "8", "ATTEMPTS": "3",
    }
    subprocess.run(["bash", "-n", folder / "job"], check=True)
    done = subprocess.run(["bash", "job"], env=environment, cwd=folder, capture_output=True, text=True, timeout=20)
    assert done.stderr == ""
    return done.returncode, (folder / "said").read_text().splitlines()


STEP = "--kill-on-bad-exit=1 shoal train runs/one.job.toml --run-folder runs/one --auto-resume"


@pytest.mark.parametrize(("codes", "code", "called"), [
    ([0], 0, [STEP]),
    ([2], 2, [STEP]),
    ([PREEMPTED], PREEMPTED, [STEP, "scontrol requeue 7"]),
    ([128 + signal.SIGUSR1], 128 + signal.SIGUSR1, [STEP, "scontrol requeue 7"]),
    ([137, 0], 0, [STEP, STEP]),
    ([137, 1, PREEMPTED], PREEMPTED, [STEP, STEP, STEP, "scontrol requeue 7"]),
    ([137, 137, 137], 137, [STEP, STEP, STEP]),
])
def test_the_batch_script_goes_on_where_that_helps(codes, code, called, tmp_path):
    assert run(tmp_path, codes) == (code, called)
    assert build_config(tomllib.loads((tmp_path / "runs" / "one.job.toml").read_text())) == CONFIG


def test_a_file_named_as_the_run_folder_is_kept(tmp_path):
    """Such as the one that was submitted: shoal launch one.toml --run-folder one."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "one.toml").write_text("# mine")
    assert run(tmp_path, [0])[0] == 0
    assert (tmp_path / "runs" / "one.toml").read_text() == "# mine"


def test_a_container_sees_the_folder_of_the_job_and_the_volume(tmp_path):
    _, [step] = run(tmp_path, [0], image="docker://shoal:1", volume="/data")
    assert step == (
        f"--kill-on-bad-exit=1 --container-image=docker://shoal:1 --container-mounts={tmp_path}:{tmp_path},/data:/data "
        f"--container-workdir={tmp_path} {STEP.partition(' ')[2]}"
    )


def test_the_batch_script_asks_for_what_the_run_needs():
    def asked(**job: Any) -> dict[str, str]:
        lines = built("slurm", **job).splitlines()
        return dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))

    needs = {"job-name": "one", "nodes": "2", "ntasks-per-node": "8", "gpus-per-node": "8", "cpus-per-task": "8",
             "requeue": "", "open-mode": "append", "signal": "USR1@180"}
    assert asked() == needs
    more = {"time": "1-00:00:00", "partition": "long", "account": "lab"}
    assert asked(**more) == needs | more
    cpus = build_config({"parallel": {"dp": 4}, "train": {"device": "cpu"}})
    lines = built("slurm", cpus, nodes=4, cpus_per_rank=2)
    assert "gpus" not in lines and "--ntasks-per-node=1\n" in lines and "--cpus-per-task=2\n" in lines


# ---- Kubernetes and SkyPilot -----------------------------------------------------------------------------------------


def test_the_manifest_says_what_shoal_says():
    found = documents(built("k8s"))
    assert list(found) == ["ConfigMap", "PersistentVolumeClaim", "JobSet"]
    assert build_config(tomllib.loads(found["ConfigMap"]["data"]["run.toml"])) == CONFIG
    job = job_of(found)["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    pod = job["template"]["spec"]
    [train] = pod["containers"]
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy needs
    assert train["resources"]["limits"] == {"nvidia.com/gpu": 8, "cpu": 64}
    rules = [rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert {(*rule["onExitCodes"]["values"],): rule["action"] for rule in rules} == {
        (2,): "FailJob", (PREEMPTED,): "Ignore"
    }
    assert all(rule["onExitCodes"]["containerName"] == train["name"] for rule in rules)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in train["volumeMounts"]} == set(volumes)
    claim = found["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == claim == "one-runs"
    mine = documents(built("k8s", volume="mine"))
    assert "PersistentVolumeClaim" not in mine
    assert "claimName: mine" in built("k8s", volume="mine")


def test_the_manifest_matches_the_schemas_of_kubernetes():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    one = build_config({"parallel": {"dp": 2}, "train": {"device": "cpu"}})
    for text in (built("k8s"), built("k8s", volume="mine"), built("k8s", one)):
        found = documents(text)
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, **job_of(found)}
        for each in (*(each for kind, each in found.items() if kind != "JobSet"), job):
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_manifest_matches_the_reference_of_jobset(nodes):
    text = built("k8s", build_config({"parallel": {"dp": 8 * nodes}}), run_folder=f"/runs/{'long' * 9}")
    check_jobset(documents(text)["JobSet"])


@pytest.mark.parametrize(("old", "new", "says"), [
    ("maxRestarts: 20", "maxRestart: 20", "spec.failurePolicy.maxRestart"),
    ("enableDNSHostnames: true", "enableDNSHostnames: 1", "spec.network.enableDNSHostnames"),
    ("action: FailJobSet", "action: FailJob", r"rules\[0\].action"),
    ("[PodFailurePolicy]", "[ExitCode]", r"onJobFailureReasons"),
    ("name: badInput", "name: bad-input", r"rules\[0\].name"),
    ("name: ranks", f"name: {'r' * 60}", "63"),
    ("v1alpha2", "v1alpha1", "apiVersion"),
    ("replicas: 1", "replicas: 1\n      completions: 2", r"replicatedJobs\[0\].completions"),
])
def test_the_check_of_jobset_finds_mistakes(old, new, says):
    text = built("k8s")
    assert text.count(old) == 1
    with pytest.raises(AssertionError, match=says):
        check_jobset(documents(text.replace(old, new))["JobSet"])


def test_the_task_of_skypilot():
    task = yaml.safe_load(built("sky"))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [PREEMPTED]
    assert task["volumes"] == {"/runs": "storage"} and "image_id" not in task["resources"]
    assert yaml.safe_load(built("sky", image="a/b:1"))["resources"]["image_id"] == "docker:a/b:1"


def test_the_task_matches_the_schema_of_skypilot():
    schemas = pytest.importorskip("sky.utils.schemas")
    validate = pytest.importorskip("jsonschema").validate
    for text in (built("sky"), built("sky", image="a/b:1")):
        task = yaml.safe_load(text)
        validate(task, schemas.get_task_schema())
        validate(task["resources"], schemas.get_resources_schema())


TORCHRUN = """#!/bin/bash
printf '%s\\n' "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$@" > "$HOME/said"
"""


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("on", ["k8s", "sky"])
def test_torchrun_is_called_as_it_wants(on, node, tmp_path):
    """The shell's part is run; the words that torchrun would get are parsed by its own parser."""
    (tmp_path / "torchrun").write_text(TORCHRUN)
    (tmp_path / "torchrun").chmod(0o755)
    if on == "k8s":
        script = job_of(documents(built(on)))["spec"]["template"]["spec"]["containers"][0]["args"][0]
    else:
        script = yaml.safe_load(built(on))["run"]
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path), "JOB_COMPLETION_INDEX": str(node),
        "SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    subprocess.run(["bash", "-eu", "-c", script], env=environment, check=True, timeout=20)
    store, *words = (tmp_path / "said").read_text().splitlines()
    given = get_args_parser().parse_args(words)
    assert store == "1" and (given.nnodes, given.nproc_per_node, given.max_restarts) == ("2", "8", 100)
    assert given.rdzv_conf == f"is_host={int(node == 0)},join_timeout=3600"
    assert given.rdzv_endpoint == ("one-ranks-0-0.one:29400" if on == "k8s" else "10.0.0.1:29400")
    assert (given.module, given.training_script) == (True, "shoal")
    run_folder = ["--run-folder", "/runs/one", "--auto-resume"]
    config = "/config/run.toml" if on == "k8s" else str(tmp_path / "one.toml")
    assert given.training_script_args == ["train", config, *run_folder]
    if on == "sky":
        assert build_config(tomllib.loads(Path(config).read_text())) == CONFIG


def test_one_node_starts_its_ranks_itself():
    one = build_config({"parallel": {"dp": 8}})
    assert "exec shoal train /config/run.toml --run-folder /runs/one --auto-resume\n" in built("k8s", one)


# ---- two nodes on one host -------------------------------------------------------------------------------------------


def test_the_two_nodes_of_compose_are_one_run():
    compose = yaml.safe_load((ROOT / "examples" / "compose.yaml").read_text())
    assert set(compose["services"]) == {"node0", "node1"}
    for name, node in compose["services"].items():
        assert node["hostname"] == name
        given = get_args_parser().parse_args([*node["entrypoint"][1:], *node["command"]])
        assert given.rdzv_endpoint == "node0:29400" and given.training_script_args[0] == "train"
        ranks = int(given.nnodes) * int(given.nproc_per_node)
        assert shoal.load_config(ROOT / "examples" / "quickstart.toml").parallel.world_size == ranks
        assert node["environment"] == {OWN_STORE: "1"}


def test_the_two_nodes_of_compose_train(tmp_path, monkeypatch):
    """Their words, as two agents on this machine; of the run, two short steps of a smaller model."""
    monkeypatch.setenv(OWN_STORE, "1")
    node = yaml.safe_load((ROOT / "examples" / "compose.yaml").read_text())["services"]["node1"]
    names = {"node0:29400": f"localhost:{28000 + os.getpid() % 1000}", "/runs/one": str(tmp_path / "run"),
             "/config/run.toml": str(ROOT / "examples" / "quickstart.toml")}
    agent = [names.get(word, word) for word in node["entrypoint"][1:-2]]
    words = [names.get(word, word) for word in node["command"]]
    small = ["--model.layers", "1", "--data.source", "synthetic", "--data.sequence_length", "32", "--train.steps", "2"]
    nodes = [start(*words, *small, agent=(*agent, "--local-addr", "localhost")) for _ in range(2)]
    said = [each.communicate(timeout=120)[0] for each in nodes]
    assert [each.returncode for each in nodes] == [0, 0], said
    assert logged(tmp_path / "run") == 2


# ---- all -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [
    STEP.partition(" ")[2], "shoal train /config/run.toml --run-folder /runs/one --auto-resume",
])
def test_their_commands_are_commands(words, tmp_path, capfd):
    """With the config's name replaced by one that is not there: that alone is wrong with them."""
    given = [str(tmp_path / "none.toml") if word.endswith(".toml") else word for word in words.split()[1:]]
    assert main(given) == 2
    assert "none.toml" in capfd.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    ("--on slurm --run-folder runs/one --parallel.dp 16 --nodes 3", r"--nodes 3 x --ranks-per-node 8 = 24 ranks, but"),
    ("--on k8s --run-folder /runs/one", r"--on k8s needs --image"),
    ("--on k8s --run-folder runs/one --image a", r"Give an absolute path whose parent is the volume"),
    ("--on ray --run-folder runs/one", r"whose parent is a file system that every node mounts"),
    ("--on sky --run-folder /runs/one --gpu H100", r"--on sky needs --volume"),
    ("--on sky --run-folder /runs/one --volume v", r"--on sky needs --gpu"),
    ("--on slurm --run-folder runs/1", r"does not begin with a letter"),
    ("--on slurm --run-folder runs/one --volume /data", r"there is no --image"),
    ("--on k8s --run-folder /runs/one --image a --time 1:00", r"--time 1:00: --on k8s has no use for it"),
    ("--on slurm --run-folder runs/one --time soon", r"time = 'soon': give minutes, hours:minutes:seconds or "),
    ("--on slurm --run-folder runs/one --partition a;b", r"partition = 'a;b'"),
    ("--on slurm --run-folder runs/one --parallel.tp 3", r"tp"),
    ("--on k8s --run-folder /runs/one --image a --data.tokenizer /there/t.json", r"not on this(.|\n)*set model\.vocab"),
])
def test_what_cannot_be_submitted_is_refused(words, message, capfd):
    assert main(["launch", *words.split(), "--dry-run"]) == 2
    assert re.search(message, capfd.readouterr().err)


def test_a_tokenizer_of_the_nodes_alone_is_not_read(capfd):
    words = "launch --on k8s --run-folder /runs/one --image a --data.tokenizer /no/t.json --model.vocab 999 --dry-run"
    assert main(words.split()) == 0
    [config, *_] = yaml.safe_load_all(capfd.readouterr().out)
    assert 'tokenizer = "/no/t.json"' in config["data"]["run.toml"]


def test_a_claim_has_room_for_the_checkpoints_that_the_run_saves(capfd):
    words = "launch --on k8s --run-folder /runs/one --image a --checkpoint.keep 1000000 --dry-run"
    assert main(words.split()) == 0
    [_, claim, _] = yaml.safe_load_all(capfd.readouterr().out)
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Gi"  # of 2 in 200 steps
    words += " --train.steps 201 --model.name llama-3.2-1b --model.vocab 128256"
    assert main(words.split()) == 0
    [_, claim, _] = yaml.safe_load_all(capfd.readouterr().out)
    size = 2 * 3 * 12 * 1_235_814_400  # two runs, each with three of weights and moments in float32
    assert claim["spec"]["resources"]["requests"]["storage"] == f"{size // 2**30 + 1}Gi"


def test_the_program_that_submits_is_named_where_it_lacks(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    for on, tool in (("slurm", "sbatch"), ("k8s", "kubectl"), ("ray", "ray"), ("sky", "sky")):
        with pytest.raises(UsageError, match=f"'{tool}' is not installed"):
            shoal.submit(CONFIG, ClusterJob(on=on, **JOBS[on]))


def test_a_failed_submission_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "sbatch").write_text('#!/bin/sh\ncat "$1" > "$0.got"\nexit ${CODE-3}\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(UsageError, match="'sbatch' exited with code 3"):
        shoal.submit(CONFIG, ClusterJob(on="slurm", **JOBS["slurm"]))
    assert (tmp_path / "sbatch.got").read_text() == built("slurm")
    monkeypatch.setenv("CODE", "0")
    shoal.submit(CONFIG, ClusterJob(on="slurm", **JOBS["slurm"]))


def test_the_image_copies_what_an_installation_needs():
    """Without Docker: what is copied is there, and not ignored."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == kept and all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert copied == {"pyproject.toml", "constraints.txt", "shoal", project["readme"], *project["license-files"]}
