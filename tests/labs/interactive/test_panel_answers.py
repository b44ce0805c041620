"""Each panel answers with the engine's numbers, and refuses a bad request with the product's own error."""

import json
from fractions import Fraction

import pytest
import torch

import shoal
from shoal.base.errors import UsageError
from shoal.labs.collectives.description import Collective
from shoal.labs.interactive import numbers
from shoal.labs.interactive.optimizers import CHOICES, LANDSCAPES, build_rule
from shoal.labs.interactive.panels import call_panel, recorded_requests
from shoal.labs.interactive.sharding import EXAMPLES


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe", "terapipe", "zb-2p"])
def test_a_timeline_is_the_simulators(schedule):
    sizes = {"pp": 4, "microbatches": 8, "backward_input": 1.5}
    answer = call_panel("timeline", {**sizes, "schedule": schedule, "link": 0.2})
    (played,) = shoal.compare_schedules(
        [schedule], comm=0.2, **sizes, **({"slices": 1} if schedule == "terapipe" else {})
    )
    timeline = played.timeline
    assert answer["step_time"] == timeline.step_time and answer["bubble"] == timeline.bubble
    assert answer["peak_live"] == timeline.peak_live.tolist()
    assert answer["span"] == pytest.approx(max(i.end for rank in range(4) for i in timeline.intervals(rank)))


def test_a_timeline_that_cannot_be_is_refused_as_by_the_simulator():
    with pytest.raises(UsageError) as refused:
        call_panel("timeline", {"schedule": "dualpipe", "pp": 3})
    with pytest.raises(UsageError) as expected:
        shoal.compare_schedules(["dualpipe"], pp=3)
    assert str(refused.value) == str(expected.value)
    with pytest.raises(UsageError, match="less than or equal to 64"):
        call_panel("timeline", {"pp": 65})


@pytest.mark.parametrize("collective", list(Collective))
@pytest.mark.parametrize("topology", ["ring", "torus-2d", "fat-tree", "islands"])
def test_a_collective_ends_with_every_block_where_it_belongs(collective, topology):
    answer = call_panel("collectives", {"collective": collective.value, "topology": topology, "ranks": 8})
    end = answer["held"][-1]
    final = {Collective.REDUCE: 1, Collective.GATHER: 1, Collective.BROADCAST: 8, Collective.ALL_REDUCE: 8,
             Collective.ALL_GATHER: 8, Collective.ALL_TO_ALL: 8}  # fmt: skip
    complete = sum(all(share == 1 for share in blocks) for blocks in end)
    if collective in final:
        assert complete >= final[collective]
    else:  # each rank has its own block
        assert all(end[rank][rank] == 1 for rank in range(8))
    assert len(answer["held"]) == 1 + len(answer["rounds"])
    own = answer["algorithms"][answer["algorithm"]]["seconds"]
    assert sum(each["seconds"] for each in answer["rounds"]) == pytest.approx(own)
    assert own == min(each["seconds"] for each in answer["algorithms"].values())


def test_messages_follow_links_of_the_network():
    answer = call_panel("collectives", {"topology": "torus-2d", "ranks": 8})
    links = {(source, target) for source, target, _ in answer["edges"]}
    for message in (m for each in answer["rounds"] for m in each["messages"]):
        assert set(zip(message["route"], message["route"][1:], strict=False)) <= links


def test_the_crossings_are_where_times_are_equal():
    answer = call_panel("collectives", {"topology": "islands", "ranks": 32})
    for (_, before), (size, after) in zip(answer["fastest"], answer["fastest"][1:], strict=False):
        near = min(range(len(answer["sizes"])), key=lambda i: abs(answer["sizes"][i] - size))
        assert answer["times"][before][max(0, near - 2)] <= answer["times"][after][max(0, near - 2)]
        assert answer["times"][before][near + 2] >= answer["times"][after][near + 2]


@pytest.mark.parametrize("expression", EXAMPLES.values(), ids=EXAMPLES)
def test_routes_lead_from_what_is_held_to_the_result(expression):
    text, mesh = expression
    answer = call_panel("sharding", {"expression": text, "mesh": mesh})
    assert [route["seconds"] for route in answer["routes"]] == sorted(r["seconds"] for r in answer["routes"])
    for route in answer["routes"]:
        held = set(answer["arrays"][:-1])
        for step in route["steps"]:
            assert set(step["before"]) <= held
            held.add(step["after"])
        assert answer["arrays"][-1] in held
        assert route["seconds"] == pytest.approx(sum(step["seconds"] for step in route["steps"]))


def test_a_route_runs_on_processes_and_equals_the_plain_product():
    answer = call_panel("run-route", {"mesh": "x=2", "route": 1})
    assert answer["equal"] and answer["ranks"] == 2 and 0 <= answer["errors"]["C"] < 1e-12
    with pytest.raises(UsageError, match="route 99: there are 4"):
        call_panel("run-route", {"mesh": "x=2", "route": 99})
    with pytest.raises(UsageError, match="at most 16 run"):
        call_panel("run-route", {"mesh": "x=32"})


@pytest.mark.parametrize("surface", LANDSCAPES)
def test_paths_are_those_of_the_update_rules(surface):
    answer = call_panel("optimizers", {"surface": surface, "rules": list(CHOICES), "steps": 5})
    start, rate = torch.tensor(LANDSCAPES[surface].start, dtype=torch.float64, requires_grad=True), 0.05
    optimizer = torch.optim.Adam([start], rate, betas=(0.9, 0.95))
    for point in answer["paths"]["adam"]["points"]:
        assert start.tolist() == pytest.approx(point, rel=1e-6, abs=1e-9)
        optimizer.zero_grad()
        LANDSCAPES[surface].loss(start).backward()
        optimizer.step()


def test_momentum_leaves_the_valley_in_which_plain_descent_stays():
    answer = call_panel("optimizers", {"surface": "local minima"})
    ends = {name: path["points"][-1][0] for name, path in answer["paths"].items()}
    assert ends["sgd"] > 0.9 and ends["momentum"] < -0.9


def test_the_hessian_of_a_surface_is_its_second_derivative():
    point = torch.tensor([0.4, -0.3], dtype=torch.float64)
    for surface in LANDSCAPES.values():
        full = torch.autograd.functional.hessian(surface.loss, point)
        assert torch.allclose(surface.hessian(point), full.diagonal())


def test_a_path_that_diverges_is_cut():
    answer = call_panel("optimizers", {"rules": ["sgd"], "rate": 5.0})
    path = answer["paths"]["sgd"]
    assert path["diverged"] and len(path["points"]) == len(path["losses"]) < 10
    with pytest.raises(UsageError, match="rules adamax"):
        build_rule("adamax")


VALUES = [
    "0.1", "-3.3e-7", "65519", "65520", "449", "464", "465", "470", "1e39", "6e-8", "2.9e-8", "0", "-0.75", "1.25",
    "3e-45",
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES)
def test_numbers_round_and_are_encoded_as_torch_does(value):
    answer = {row["name"]: row for row in call_panel("numbers", {"value": value})["formats"]}
    for name, kind in numbers.KINDS.items():
        if name in ("tf32", "fp4 e2m1"):  # torch does not cast to these
            continue
        dtype = getattr(torch, kind.format.name)
        given, row = torch.tensor(float(value), dtype=torch.float64), answer[name]
        if kind.saturates:  # before PyTorch 2.13, its cast gives NaN
            given = given.clamp(-kind.format.largest, kind.format.largest)
        expected = given.to(dtype)
        if row["infinite"]:
            assert not expected.to(torch.float64).isfinite()
        else:
            assert float(row["nearest"]) == pytest.approx(expected.item(), rel=1e-15)
        unsigned = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.format.itemsize]
        size = 8 * kind.format.itemsize
        assert row["stored"] == f"{expected.view(unsigned).item() % 2**size:0{size}b}", name


def test_small_formats_round_to_their_few_values():
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # of e2m1, OCP MX version 1.0, table 5
    for exact, nearest in ((0.2, 0), (0.25, 0), (0.26, 0.5), (2.5, 2), (5, 4), (5.1, 6), (1e9, 6)):
        assert numbers.round_to(numbers.KINDS["fp4 e2m1"], Fraction(exact)) == nearest
    codes = [numbers.encode_bits(numbers.KINDS["fp4 e2m1"], Fraction(v), negative=False) for v in values]
    assert [int("".join(code), 2) for code in codes] == list(range(8))
    tf32 = numbers.KINDS["tf32"]  # ten digits: ties at 2^-11 above 1 go to the even one
    assert numbers.round_to(tf32, 1 + Fraction(1, 2**11)) == 1
    assert numbers.round_to(tf32, 1 + Fraction(3, 2**11)) == 1 + Fraction(2, 2**10)


@pytest.mark.parametrize("value", ["", "abc", "1e9999", "0x10", "nan", "1" * 80])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(UsageError, match="value"):
        call_panel("numbers", {"value": value})


@pytest.mark.parametrize("of", ["activations", "weights"])
def test_scaled_gradients_are_counted_as_torch_casts_them(of):
    gradients = numbers.measure_gradients(of)
    total = (gradients != 0).sum().item()
    for exponent in (0, 20, 28):
        answer = call_panel("gradients", {"of": of, "exponent": exponent, "format": "fp16"})
        half = (gradients * 2.0**exponent).half()
        assert answer["shares"]["too large"] == (~half.isfinite()).sum().item() / total
        assert answer["shares"]["zero"] == ((half == 0) & (gradients != 0)).sum().item() / total
        assert sum(answer["shares"].values()) == pytest.approx(1)
        assert sum(answer["counts"]) == answer["total"] == total


def test_every_recorded_request_has_an_answer_of_plain_values():
    seen = set()
    for name, request in recorded_requests():
        if name not in seen or name in ("timeline", "sharding"):
            json.dumps(call_panel(name, request), allow_nan=False)
        seen.add(name)
    assert {"timeline", "collectives", "sharding", "optimizers", "numbers", "gradients"} <= seen
