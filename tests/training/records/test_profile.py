"""Profiles of real runs: every action of the program once and in order, on one clock; nothing where not asked for."""

import gzip
import json
import re
import shutil
import time
from collections import Counter

import pytest
import torch.distributed as dist

from shoal.cli.main import main
from shoal.pipeline.from_layout import build_layout_program
from shoal.pipeline.program import RECEIVES, SENDS, find_receive, matching_send
from shoal.report.run import read_run
from shoal.report.watch import watch
from shoal.training.records.profile import IncompleteProfileError, read_profile
from shoal.training.records.profiler import clock_offset
from tests.trainings.runs import small_config, train_in

PROFILED = {"profile": True, "profile_after": 1, "profile_steps": 2}


@pytest.mark.parametrize(("parallel", "model"), [
    ({}, {}),
    ({"ep": 2, "schedule": "dualpipev", "ep_overlap": True}, {"experts": {"count": 2, "ffn": 16}}),  # in two threads
])  # fmt: skip
def test_traces_of_torch_have_the_operators_of_the_recorded_steps(parallel, model, corpus, pool, tmp_path):
    config = small_config(
        corpus, {"dp": 2, **parallel}, model=model, train={"steps": 3, "validate_every": 0, "global_batch": 4},
        metrics={"trace": True, "profile_after": 1, "profile_steps": 2},
    )
    folder = train_in(pool, config, tmp_path / "run")
    for rank in range(2):
        with gzip.open(folder / "profile" / f"trace-rank-{rank:05d}.json.gz") as file:
            names = Counter(event.get("name") for event in json.load(file)["traceEvents"])
        passes = 2 * config.parallel.microbatches(config.train.global_batch)
        assert names["aten::embedding"] == names["SummedCrossEntropyBackward"] == passes
    assert read_profile(folder).ranks[1].steps == (1, 2)
    assert ("operators and kernels, for Perfetto", "profile/trace-rank-00000.json.gz, 2 in all") in (
        read_run(folder, config).facts()
    )


@pytest.mark.parametrize(
    "parallel",
    [
        {"pp": 2, "schedule": "1f1b"},
        {"pp": 2, "schedule": "zb-v"},
        {"pp": 4, "schedule": "gpipe"},
        {"pp": 2, "schedule": "pipedream"},
        {"pp": 2, "dp": 2, "zero": 1, "schedule": "interleaved-1f1b"},
        {"dp": 2, "tp": 2},
    ],
    ids=str,
)
def test_every_action_is_recorded_once_in_order_and_on_one_clock(parallel, corpus, pool, tmp_path):
    config = small_config(
        corpus, {"micro_batch": 1, **parallel}, model={"layers": 4}, metrics=PROFILED,
        train={"steps": 3, "global_batch": 4, "validation_sequences": 4, "validate_every": 0},
        optimizer={"clip_norm": 0.0},
    )
    folder = train_in(pool, config, tmp_path / "run")
    profile, layout = read_profile(folder), config.parallel
    program = build_layout_program(layout, layout.microbatches(config.train.global_batch))
    assert profile.program == program
    assert [rank.rank for rank in profile.ranks] == list(range(layout.world_size))
    assert {(rank.pp, rank.dp, rank.tp) for rank in profile.ranks} == {
        (p, d, t) for p in range(layout.pp) for d in range(layout.dp) for t in range(layout.tp)
    }
    for rank in profile.ranks:
        assert rank.actions == program.actions[rank.pp] and rank.steps == (1, 2)
        for begin, arrived, end in zip(rank.begin, rank.arrived, rank.end, strict=True):
            assert len(begin) == len(arrived) == len(end) == len(rank.actions)
            assert all(b <= a <= e for b, a, e in zip(begin, arrived, end, strict=True))
            assert all(e <= b for e, b in zip(end[:-1], begin[1:], strict=True))
            only = {a.op for a, b, t in zip(rank.actions, begin, arrived, strict=True) if t > b}
            assert not only & (SENDS | RECEIVES)  # to post a message is not to wait
        assert rank.end[0][-1] <= rank.begin[1][0]
        held = sorted(name for bucket in rank.buckets for name in bucket.names)
        assert held and len(held) == len(set(held))
        assert {bucket.shards for bucket in rank.buckets} == {layout.dp if layout.zero else 1}
        for reductions, begin, end in zip(rank.reductions, rank.begin, rank.end, strict=True):
            every = sorted([*range(len(rank.buckets))] * profile.program.updates)
            assert sorted(number for number, _, _ in reductions) == every
            assert all(begin[0] <= start <= done <= end[-1] for _, start, done in reductions)
            assert [start for _, start, _ in reductions] == sorted(start for _, start, _ in reductions)
    by_place = {(rank.pp, rank.dp, rank.tp): rank for rank in profile.ranks}
    messages = 0
    for rank in profile.ranks:
        for step in range(2):
            for i, action in enumerate(rank.actions):
                needed = find_receive(action, program)
                if needed is None:
                    continue
                send = matching_send(needed)
                other = by_place[program.stage_rank[send.stage], rank.dp, rank.tp]
                assert other.begin[step][other.actions.index(send)] <= rank.arrived[step][i]
                messages += 1
    assert (messages > 0) == (layout.pp > 1)


def test_a_step_that_is_computed_twice_is_recorded_once(corpus, pool, tmp_path):
    config = small_config(
        corpus, {"dp": 2}, train={"steps": 3, "validate_every": 0}, metrics=PROFILED, failover={"reexecute_every": 1}
    )
    assert read_profile(train_in(pool, config, tmp_path / "run")).ranks[0].steps == (1, 2)


def test_nothing_is_recorded_unasked_and_a_profile_is_that_of_the_last_start(corpus, pool, tmp_path):
    config = small_config(corpus, {"pp": 2}, train={"steps": 4, "validate_every": 0})
    folder = train_in(pool, config, tmp_path / "run")
    assert read_profile(folder) is None
    longer, longest = (config.train.model_copy(update={"steps": steps}) for steps in (8, 11))
    profiled = config.metrics.model_copy(update=PROFILED | {"profile_steps": 100})
    again = config.model_copy(update={"train": longer, "metrics": profiled})
    train_in(pool, again, folder, resume=True)
    assert read_profile(folder).ranks[0].steps == (5, 6, 7)  # the first step after a resume is warm-up
    alone = again.model_copy(update={"parallel": config.parallel.model_copy(update={"pp": 1}), "train": longest})
    for rank in range(2):
        (folder / "profile" / f"trace-rank-{rank:05d}.json.gz").touch()  # of a start with traces
    (folder / "profile" / "rank-00000.jsonl.1.partial").touch()  # of a killed rank
    train_in(pool, alone, folder, resume=True)
    assert [rank.steps for rank in read_profile(folder).ranks] == [(9, 10)]
    assert [path.name for path in (folder / "profile").iterdir()] == ["rank-00000.jsonl"]


def test_the_files_are_plain_lines_and_a_missing_rank_is_named(corpus, pool, tmp_path):
    config = small_config(corpus, {"pp": 2}, train={"steps": 2, "validate_every": 0}, metrics=PROFILED)
    folder = train_in(pool, config, tmp_path / "run")
    assert sorted(path.name for path in (folder / "profile").iterdir()) == ["rank-00000.jsonl", "rank-00001.jsonl"]
    header, step = map(json.loads, (folder / "profile" / "rank-00001.jsonl").read_text().splitlines())
    assert header["actions"][0] == ["RF", 1, 0, -1, -1] and step["step"] == 1
    (folder / "profile" / "rank-00001.jsonl").unlink()
    with pytest.raises(IncompleteProfileError, match="1 of 2 x 1 x 1 ranks"):
        read_profile(folder)


def test_a_profile_of_two_starts_is_left_out_of_the_report_with_one_note(corpus, pool, tmp_path, capsys):
    """A start that ends between the writes of its ranks leaves files of an earlier one; both have the same steps."""
    config = small_config(corpus, {"dp": 2}, train={"steps": 3, "validate_every": 0}, metrics=PROFILED)
    first, second = (train_in(pool, config, tmp_path / name) for name in ("first", "second"))
    assert main(["report", str(first)]) == 0 and "measured step" in capsys.readouterr().out
    shutil.copy(second / "profile" / "rank-00000.jsonl", first / "profile")
    assert main(["report", str(first)]) == 0
    said, page = capsys.readouterr().out, (first / "report.html").read_text()
    watched = watch(first, out=tmp_path / "watched.html").read_text()
    note = "is incomplete: it has 2 of 1 x 2 x 1 ranks, of 2 starts"
    assert all(text.count(note) == 1 and "No step was profiled" not in text for text in (said, page, watched))
    assert "measured step" not in said


DAMAGED = {
    "cut off": lambda lines: [lines[0], lines[1][:20]],
    "a time is missing": lambda lines: [lines[0], re.sub(r'"end":\[[^,]*,', '"end":[', lines[1]), *lines[2:]],
    "out of order": lambda lines: [lines[0], re.sub(r'"arrived":\[[^,]*,', '"arrived":[1e16,', lines[1]), *lines[2:]],
    "no time": lambda lines: [lines[0], re.sub(r'"end":\[[^,]*,', '"end":[NaN,', lines[1]), *lines[2:]],
    "no header": lambda lines: lines[1:],
    "nothing": lambda lines: [],
    "a list": lambda lines: ["[]", *lines[1:]],
    "a list for a stage": lambda lines: [lines[0].replace('["F",0,', '["F",[],'), *lines[1:]],
    "a stage too many": lambda lines: [lines[0].replace('["F",0,', '["F",2,'), *lines[1:]],
    "other actions": lambda lines: [lines[0].replace('"actions":[[', '"actions":[["F",9],['), *lines[1:]],
}


@pytest.fixture(scope="module")
def profiled(corpus, pool, tmp_path_factory):
    config = small_config(corpus, {}, train={"steps": 2, "validate_every": 0}, metrics=PROFILED)
    return train_in(pool, config, tmp_path_factory.mktemp("profiled") / "run")


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_profile_is_one_clear_error(profiled, tmp_path, capsys, damage):
    folder = shutil.copytree(profiled, tmp_path / "run")
    path = folder / "profile" / "rank-00000.jsonl"
    path.write_text("\n".join(DAMAGED[damage](path.read_text().splitlines())))
    assert main(["report", str(folder)]) == 2
    said = capsys.readouterr().err
    assert ("ends before it begins" in said) == (damage in ("out of order", "no time"))
    assert f"{folder / 'profile'} cannot be read as a profile" in said
    assert "Traceback" not in said


def test_a_profile_with_the_former_names_of_a_programs_fields_is_read(profiled, tmp_path):
    shutil.copytree(profiled / "profile", tmp_path / "profile")
    for path in (tmp_path / "profile").iterdir():
        text = path.read_text()
        assert '"model_copies"' in text and '"sequence_slices"' in text
        path.write_text(text.replace('"model_copies"', '"copies"').replace('"sequence_slices"', '"parts"'))
    assert read_profile(tmp_path) == read_profile(profiled)


def test_a_profile_without_steps_is_refused_before_any_work(capsys):
    assert main(["train", "--profile", "--train.steps", "3"]) == 2
    assert "metrics.profile_after = 3 leaves nothing" in capsys.readouterr().err


def skewed(host: list[str], skew: list[float]) -> float:
    rank = dist.get_rank()
    return clock_offset(dist.group.WORLD, lambda: time.perf_counter() + skew[rank], host[rank])


def test_clocks_of_other_hosts_are_set_by_that_of_rank_0(pool):
    skew = [5.0, -3.0, 7.0, 5.0]
    offsets = pool.run(skewed, 4, ["a", "b", "c", "a"], skew)
    assert offsets[0] == offsets[3] == 0.0  # of one host: one clock
    for rank in (1, 2):
        assert offsets[rank] == pytest.approx(skew[0] - skew[rank], abs=0.05)
